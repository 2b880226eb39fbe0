"""Reads something again and again while somebody looks at it. If a read fails, the last good value is still shown."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from data_service.errors import UserError

_EVERY_S = 2.0  # between two reads
_SHARE = 5.0  # or so many times as long as the last one took: reading takes a sixth of a core at most
_IDLE_S = 60.0  # after the last look, reading ends
_FIRST_S = 3.0  # so long the looks that wake it up wait for the first read

T = TypeVar("T")


@dataclass(frozen=True)
class View(Generic[T]):
    """What is known now. Times in seconds.

    Attributes:
        value: of the last read that went well; None before it.
        version: another one with every value.
        age: since then.
        error: why the last read failed; None if it did not. failing: since the first of those that did.
        reading: how long the present read has taken; None if there is none.
    """

    value: T | None
    version: int
    age: float
    error: str | None
    failing: float
    reading: float | None


class Watched(Generic[T]):
    """Calls `read` on a thread of its own, from the first look until nobody has looked for a minute.

    A look returns at once what was read last. Where nobody has looked for a while, what was read last is old: until
    the first read since then has ended, looks wait, for a short time.
    """

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._changed = threading.Condition()
        self._running = False
        self._fresh = False  # a read has ended since it was woken up, well or not
        self._woken = 0.0
        self._looked = 0.0
        self._value: T | None = None
        self._version = 0
        self._read_at = 0.0
        self._error: str | None = None
        self._failed_at = 0.0
        self._began: float | None = None

    def look(self, patience_s: float = _FIRST_S) -> View[T]:
        """What is known now. A first read is waited for, so long at most after it was woken up."""
        with self._changed:
            self._looked = self._clock()
            if not self._running:
                self._running, self._fresh, self._woken = True, False, self._looked
                threading.Thread(target=self._run, name="watch", daemon=True).start()
            self._changed.wait_for(lambda: self._fresh, max(0.0, self._woken + patience_s - self._looked))
            now = self._clock()
            return View(
                self._value,
                self._version,
                now - self._read_at,
                self._error,
                now - self._failed_at,
                None if self._began is None else now - self._began,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._began = self._clock()
            value, error = self._try()
            with self._changed:
                now = self._clock()
                took, self._began = now - self._began, None
                self._take(value, error, now)
                self._fresh = True
                self._changed.notify_all()
                self._changed.wait(max(_EVERY_S, _SHARE * took))
                if self._clock() - self._looked > _IDLE_S:
                    self._running = False
                    return

    def _try(self) -> tuple[T | None, str | None]:
        try:
            return self._read(), None
        except UserError as error:
            return None, error.problem
        except Exception as error:  # records of anybody's making; it is shown, and the next read may go well
            return None, f"what is stored there cannot be used: {type(error).__name__}: {error}"

    def _take(self, value: T | None, error: str | None, now: float) -> None:
        if error is None:
            self._value, self._read_at = value, now
            self._version += 1
        elif self._error is None:
            self._failed_at = now
        self._error = error
