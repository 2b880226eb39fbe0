"""Processes that share a store and get their turns one request at a time: every interleaving can be had again.

Each process is a thread that waits before every request to its store until it is given a turn. The store's clock stands
still unless time is made to pass.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from data_service.store.base import Entry
from data_service.store.errors import KeyMissing, StoreUnavailable

Turn = Literal["carried out", "lost", "answer lost", "dies before", "dies after"]


class Dies(BaseException):
    """What a process that is killed raises: nobody catches it."""


@dataclass
class Memory:
    """Objects and when they were written, by a clock of their own, in seconds."""

    now: float = 0.0
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)


class TurnStore:
    """`Store`, as far as claims need it. `turn` waits for a turn and says what becomes of the request."""

    def __init__(self, memory: Memory, turn: Callable[[], Turn], prefix: str = "") -> None:
        self._memory, self._turn, self._prefix = memory, turn, prefix

    @property
    def uri(self) -> str:
        return f"memory/{self._prefix}"

    def at(self, prefix: str) -> "TurnStore":
        return TurnStore(self._memory, self._turn, f"{self._prefix}{prefix}/")

    def get(self, key: str) -> bytes:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        if found is None:
            raise KeyMissing.at(self.uri + key)
        return found[0]

    def put(self, key: str, data: bytes) -> None:
        with self._request():
            self._memory.objects[self._prefix + key] = data, self._memory.now

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._request():
            absent = self._prefix + key not in self._memory.objects
            if absent:
                self._memory.objects[self._prefix + key] = data, self._memory.now
        return absent

    def size(self, key: str) -> int | None:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        return None if found is None else len(found[0])

    def age(self, key: str) -> float | None:
        with self._request():
            found = self._memory.objects.get(self._prefix + key)
        return None if found is None else self._memory.now - found[1]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._request():
            keys = sorted(key for key in self._memory.objects if key.startswith(self._prefix + prefix))
        for key in keys:
            yield Entry(key.removeprefix(self._prefix), 1)

    def _request(self) -> "_Request":
        return _Request(self._turn(), self.uri)


class _Request:
    def __init__(self, turn: Turn, uri: str) -> None:
        self._turn, self._uri = turn, uri

    def __enter__(self) -> None:
        if self._turn == "dies before":
            raise Dies
        if self._turn == "lost":
            raise StoreUnavailable.at(self._uri, "no connection")

    def __exit__(self, *error: object) -> None:
        if self._turn == "dies after":
            raise Dies
        if self._turn == "answer lost":
            raise StoreUnavailable.at(self._uri, "no answer")


class Process:
    """Runs `program` with a store of its own until it is `over`; it stands still between turns.

    `failure`: what it raised.
    """

    def __init__(self, memory: Memory, program: Callable[[TurnStore], None]) -> None:
        self._program = program
        self._given: Turn = "carried out"
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(TurnStore(memory, self._wait),), daemon=True)
        self._thread.start()
        self._stands.acquire()

    def give(self, turn: Turn = "carried out") -> None:
        """One request; back when it stands before the next, or is over."""
        if not self.over:
            self._given = turn
            self._go.release()
            self._stands.acquire()

    def _run(self, store: TurnStore) -> None:
        try:
            self._program(store)
        except Dies:
            pass
        except Exception as error:
            self.failure = error
        finally:
            self.over = True
            self._stands.release()

    def _wait(self) -> Turn:
        self._stands.release()
        self._go.acquire()
        return self._given
