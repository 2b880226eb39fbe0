"""How a run is asked to stop: by a signal to its command, or through its store from anywhere."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from checkpoints.attempt import Attempt
from checkpoints.stop import stop_requested
from data_service.store.errors import StoreError

REQUEUE = 75  # the exit code that says: run the same command again to go on
STOPPED = 3  # somebody wants the run to stand still: schedulers leave it
POLL_S = 2.0


class Stopping:
    """SIGTERM, Ctrl-C and requests in the store ask for a commit and a clean end; a second Ctrl-C ends at once.

    Listens between `with` and its end. Use it in the main thread, and after ray.init, which installs handlers of its
    own.

    Args:
        attempt: the first one of this command.
        tell: tells the ranks.
        note: shows a line to the operator.

    Attributes:
        reason: who asked; None while nobody has.
        code: with which the command is to end then. A signal comes from a machine that is wanted elsewhere, a
            request in the store from somebody who wants the run to stand still.
    """

    def __init__(
        self,
        attempt: Attempt,
        tell: Callable[[], object],
        note: Callable[[str], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._attempt, self._tell, self._note, self._poll_s = attempt, tell, note, poll_s
        self.reason: str | None = None
        self.code = REQUEUE
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stop requests", daemon=True)

    def __enter__(self) -> "Stopping":
        signals = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._signalled) for number in signals}
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._ask(signal.Signals(number).name, REQUEUE)

    def _look(self) -> None:
        """A store that does not answer is asked again: training has its own ways to notice."""
        while not self._over.wait(self._poll_s) and self.reason is None:
            try:
                request = stop_requested(self._attempt.store, self._attempt.number)
            except StoreError:
                continue
            if request is not None:
                self._ask(f"stop requested by {request.by}", STOPPED)

    def _ask(self, reason: str, code: int) -> None:
        if self.reason is None:
            self.reason, self.code = reason, code
            self._note(f"{reason}: finishing this step, saving, then ending with code {code}")
            self._tell()
