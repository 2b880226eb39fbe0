"""How a run is asked to stop: by a signal to its command, or through its store from anywhere."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from checkpoints.attempt import Attempt
from checkpoints.ownership import stop_requested
from data_service.store.errors import StoreError
from launcher.contract import REPEAT, STOPPED
from launcher.signals import heeded

POLL_S = 2.0
_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal was closed (SIGHUP)"}


class Stopping:
    """Takes requests to stop: SIGTERM, SIGHUP, Ctrl-C and `maskfleet runs stop`. All ask for a commit and a clean end;
    a second Ctrl-C ends the command at once.

    Use it with `with`, in the main thread. Before ranks train there is nothing to commit: whatever takes time then
    looks at `asked` now and then.

    Args:
        note: shows a line to the operator.

    Attributes:
        asked: set by the first request.
        reason: who asked; None if nobody has.
        code: the exit code that then follows. A signal means that the machine is wanted for something else, so the
            command may be given again; a request in the store means that the run is to stay stopped.
    """

    def __init__(self, note: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._note, self._poll_s = note, poll_s
        self._tell: Callable[[], object] | None = None
        self._signals: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._signalled = False
        self._asking = threading.Lock()
        self.asked = threading.Event()
        self.reason: str | None = None
        self.code = REPEAT

    def __enter__(self) -> "Stopping":
        self._before = {number: signal.getsignal(number) for number in heeded()}
        self._heeding = threading.Thread(target=self._heed, name="signals", daemon=True)
        self._heeding.start()
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._signals.put(None)
        self._heeding.join(self._poll_s)

    def listen(self) -> None:
        """Install the signal handlers. Call it again after `ray.init`, which installs handlers of its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    @contextmanager
    def requests(self, attempt: Attempt) -> Iterator[None]:
        """While this lasts, look in the store for requests to the command whose first attempt this is."""
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(attempt, over), name="stop requests", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """While this lasts, ranks train, and `tell` passes a request on to them; an earlier request at once."""
        self._tell = tell
        if self.asked.is_set():
            tell()
        try:
            yield
        finally:
            self._tell = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It runs between any two instructions of the main thread, which may hold a lock or be
        writing, so it takes no lock and writes nothing. `SimpleQueue.put` is safe here."""
        if (self._signalled or self.asked.is_set()) and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        self._signals.put(signal.Signals(number))

    def _heed(self) -> None:
        while (number := self._signals.get()) is not None:
            self._ask(_WORDS.get(number, number.name), REPEAT)

    def _look(self, attempt: Attempt, over: threading.Event) -> None:
        """Errors of the store are ignored here: training notices them by itself."""
        while not over.wait(self._poll_s) and not self.asked.is_set():
            try:
                request = stop_requested(attempt.store, attempt.number)
            except StoreError:
                continue
            if request is not None:
                self._ask(f"stop requested by {request.by}", STOPPED)

    def _ask(self, reason: str, code: int) -> None:
        with self._asking:
            if self.asked.is_set():
                return
            self.reason, self.code = reason, code
            self.asked.set()
        doing = "finishing this step, saving" if self._tell is not None else "no step was under way"
        self._note(f"{reason}: {doing}, then ending with code {code}")
        if self._tell is not None:
            self._tell()
