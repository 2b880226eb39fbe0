"""Runs writes of records in order on a background thread. Callers neither wait for them nor fail because of them."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from data_service.store.errors import StoreError

_log = logging.getLogger(__name__)

_RETRY_S = 1.0  # wait after a failed write, which the store has retried for minutes

Write = Callable[[], object]


class Recorder:
    """Runs writes one after another in a background thread, each until it succeeds.

    While the store does not answer, at most `capacity` writes wait; then each new one drops the oldest. In each outage
    `note` tells the operator once that writes wait, and once that some are lost.

    Args:
        note: function that shows a line to the operator.
        capacity: largest number of writes that wait.
        again_s: seconds before a failed write is repeated.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        capacity: int = 4096,
        again_s: float = _RETRY_S,
    ) -> None:
        self._note, self._capacity, self._again_s = note, capacity, again_s
        self._waiting: deque[Write] = deque()
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._told: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        """Have `write` done soon. Returns at once and never raises."""
        with self._changed:
            self._waiting.append(write)
            if len(self._waiting) > self._capacity:
                self._waiting.popleft()
                self._tell("lost", "that wait to be written no longer fit in memory: the oldest are lost")
            self._changed.notify_all()

    def drain(self, patience_s: float) -> bool:
        """Wait until all submitted writes are done, at most `patience_s` seconds. Return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, patience_s)

    def close(self, patience_s: float = 0.0) -> bool:
        """Drain, then stop. Writes that are not done by then are lost. Return whether all were done."""
        done = self.drain(patience_s)
        with self._changed:
            self._closed = True
            self._closing.set()
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while (write := self._next_write()) is not None:
            self._retry_write(write)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_write(self) -> Write | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            self._busy = True
            return self._waiting.popleft()

    def _retry_write(self, write: Write) -> None:
        while not self._closing.is_set():
            try:
                write()
                self._told.clear()
                return
            except StoreError as error:
                _log.warning("a record waits: %s", error.problem)
                self._tell("waiting", f"cannot be written yet: {error.problem}; training continues")
            except Exception as error:
                _log.exception("a record could not be made")
                self._note(f"a record could not be made: {type(error).__name__}: {error}")
                return
            self._closing.wait(self._again_s)

    def _tell(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._note(f"records {text}")
