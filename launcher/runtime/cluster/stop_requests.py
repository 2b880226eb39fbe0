"""Requests to stop a run: signals to its command, and requests that any machine writes to its store."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from checkpoints.attempt import Attempt
from checkpoints.ownership import find_stop_request
from data_service.store.errors import StoreError
from launcher.command import mark_saving
from launcher.exit_codes import REPEAT, STOPPED
from launcher.signals import handled_signals

STOP_POLL_S = 2.0
_SIGNAL_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal was closed (SIGHUP)"}


class StopRequests:
    """A receiver of requests to stop: SIGTERM, SIGHUP, Ctrl-C and `maskfleet runs stop`. All ask for a commit and a
    clean end; a second Ctrl-C ends the command at once.

    Use it as a context manager, in the main thread. Before ranks train there is nothing to commit: code that takes long
    then checks `asked` now and then.

    Args:
        note: function that shows a line to the operator.

    Attributes:
        asked: event that is set by the first request.
        reason: the source of that request, as text; None if there was none.
        code: exit code of the command after the request. A signal means that the machine is needed for something else,
            so the command may be given again; a request in the store means that the run must stay stopped.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._saves = False  # whether ranks train: they save when they are stopped
        self._signals: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._signalled = False
        self._asking = threading.Lock()
        self.asked = threading.Event()
        self.reason: str | None = None
        self.code = REPEAT

    def __enter__(self) -> "StopRequests":
        self._before = {number: signal.getsignal(number) for number in handled_signals()}
        self._heeding = threading.Thread(target=self._take_signals, name="signals", daemon=True)
        self._heeding.start()
        self.install_handlers()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._signals.put(None)
        self._heeding.join(STOP_POLL_S)

    def install_handlers(self) -> None:
        """Install the signal handlers. Call it again after `ray.init`, which installs handlers of its own."""
        for number in self._before:
            signal.signal(number, self._handle_signal)

    @contextmanager
    def watching_store(self, attempt: Attempt) -> Iterator[None]:
        """Look in the store for requests to stop, inside the `with` block. `attempt`: the first attempt of the
        command."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch_store, args=(attempt, over), name="stop requests", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    @contextmanager
    def while_ranks_train(self) -> Iterator[None]:
        """Note that ranks train inside the `with` block, which save at a request to stop and get the time for it."""
        self._saves = True
        try:
            with mark_saving():
                yield
        finally:
            self._saves = False

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. This runs between any two instructions of the main thread, which may hold a lock or be
        writing, so it takes no lock and writes nothing. `SimpleQueue.put` is safe here."""
        if (self._signalled or self.asked.is_set()) and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        self._signals.put(signal.Signals(number))

    def _take_signals(self) -> None:
        while (number := self._signals.get()) is not None:
            self._request_stop(_SIGNAL_WORDS.get(number, number.name), REPEAT)

    def _watch_store(self, attempt: Attempt, over: threading.Event) -> None:
        """Look for a request in the store until one comes or `over` is set. Errors of the store are ignored: training
        notices them by itself."""
        while not over.wait(STOP_POLL_S) and not self.asked.is_set():
            try:
                request = find_stop_request(attempt.store, attempt.number)
            except StoreError:
                continue
            if request is not None:
                self._request_stop(f"stop requested by {request.by}", STOPPED)

    def _request_stop(self, reason: str, code: int) -> None:
        with self._asking:
            if self.asked.is_set():
                return
            self.reason, self.code = reason, code
            self.asked.set()
        doing = "finishing this step, saving" if self._saves else "no step was under way"
        self._note(f"{reason}: {doing}, then ending with code {code}")
