"""Requests to stop a run: signals to its command, and stop requests in its store (`maskfleet runs stop`)."""

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

STOP_POLL_S = 2.0  # interval of checks of the store for a stop request
_SIGNAL_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the terminal was closed (SIGHUP)"}  # shown to the operator


class StopRequests:
    """Receives requests to stop: SIGTERM, SIGHUP, Ctrl-C and `maskfleet runs stop`. After each of them the command
    saves a checkpoint and ends; a second Ctrl-C ends it at once.

    Use it as a context manager in the main thread. Code that may take long before training must check `asked`.

    Args:
        note: function that shows a line to the operator.

    Attributes:
        asked: event that is set by the first request.
        reason: where the first request came from, as text; None if there was none.
        code: exit code of the command after the request. After a signal it is REPEAT: the run can continue later, since
            only the machine was wanted back. After a request in the store it is STOPPED: do not start the run again.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._saves = False  # whether ranks are training, so that a stop saves a checkpoint
        self._signals: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._signalled = False
        self._asking = threading.Lock()
        self.asked = threading.Event()
        self.reason: str | None = None
        self.code = REPEAT

    def __enter__(self) -> "StopRequests":
        self._before = {number: signal.getsignal(number) for number in handled_signals()}
        self._heeding = threading.Thread(target=self._handle_queued_signals, name="signals", daemon=True)
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
        """Check the store for stop requests during the `with` block. `attempt`: the first attempt of the command."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch_store, args=(attempt, over), name="stop requests", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    @contextmanager
    def while_ranks_train(self) -> Iterator[None]:
        """Mark the `with` block as training: after a request to stop, the ranks get time to save a checkpoint."""
        self._saves = True
        try:
            with mark_saving():
                yield
        finally:
            self._saves = False

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Queue a signal for another thread. A signal handler may interrupt the main thread while it holds a lock or
        writes, so this must do neither; `SimpleQueue.put` is reentrant."""
        if (self._signalled or self.asked.is_set()) and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
        self._signals.put(signal.Signals(number))

    def _handle_queued_signals(self) -> None:
        while (number := self._signals.get()) is not None:
            self._request_stop(_SIGNAL_WORDS.get(number, number.name), REPEAT)

    def _watch_store(self, attempt: Attempt, over: threading.Event) -> None:
        """Check the store for a request until there is one or `over` is set. Errors of the store are ignored here."""
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
        doing = "finishing this step, saving" if self._saves else "no step is running"
        self._note(f"{reason}: {doing}, then ending with code {code}")
