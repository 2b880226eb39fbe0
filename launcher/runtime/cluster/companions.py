"""What accompanies a start of a run, and is not needed for it. The command line says what that is: the runtime knows no
tracker and no measure."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from launcher.runtime.run.record import Run

Note = Callable[[str], None]
"""Shows a line to the operator."""


@dataclass(frozen=True)
class Companions:
    """What goes wrong in one of them is noted; training goes on.

    Attributes:
        publishing: lasts as long as the start and tells others of the run.
        evaluating: lasts as long as Ray is connected and evaluates commits. It gets the event that is set when the
            command is asked to stop.
        pending: whether the newest commit of the run still has to be evaluated.
    """

    publishing: Callable[[Run, Note], AbstractContextManager[None]]
    evaluating: Callable[[Run, Note, threading.Event], AbstractContextManager[None]]
    pending: Callable[[Run], bool]
