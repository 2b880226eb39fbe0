"""`maskfleet runs stop`: asks a run to end cleanly. The request goes through the run's store, so the run may be
anywhere."""

import getpass
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.ownership import Presence, StopRequest, presence, request_stop
from data_service.store.base import Store
from launcher.runtime.run.log import operator_event

_POLL_S = 1.0


@dataclass(frozen=True)
class Asked:
    """What came of asking.

    Attributes:
        found: the newest start of the run when it was asked, None if there was never one.
        asked: whether it was running, and so was asked to stop.
    """

    found: Presence | None
    asked: bool


def stop(store: Store, now: float) -> Asked:
    """Ask the present start of the run in `store` to commit and end, and record that as an event. `now`: seconds since
    1970.

    If no start is running, nothing is written, so the next start is not affected.
    """
    found = presence(store, now)
    if found is None or found.state != "running":
        return Asked(found, asked=False)
    by = here()
    request_stop(store, StopRequest(attempt=found.attempt, by=by, time=now))
    operator_event(store, "stop_requested", now, by=by, of=found.attempt)
    return Asked(found, asked=True)


def wait(store: Store, asked: Presence, clock: Callable[[], float], poll_s: float = _POLL_S) -> Presence:
    """Wait until the command to which `asked` belongs has ended. Returns how its last start ended, or the start of
    another command. `clock`: seconds since 1970."""
    tick = threading.Event()
    while True:
        found = presence(store, clock())
        assert found is not None, "a start's record is never deleted"
        if found.state != "running" or not found.owner.same_process(asked.owner):
            return found
        tick.wait(poll_s)


def here() -> str:
    """Return who asks, for people."""
    return f"{getpass.getuser()}@{socket.gethostname()}"
