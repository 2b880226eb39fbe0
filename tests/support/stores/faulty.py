"""Folders as stores that misbehave on command.

`FaultyStore` hangs or does not answer while a file beside it says so, in every process. `ClockedStore` tells ages by a
clock that stands still; `silent_for` makes the starts of a run in a folder old.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_service.store.base import Entry
from data_service.store.errors import AccessDenied, OutOfSpace, StoreUnavailable
from data_service.store.local import LocalStore

_FAULTS = ("hangs", "down", "denied", "full")


@dataclass(frozen=True)
class FaultyStore(LocalStore):
    """`set_fault(store, "hangs")`, "down", "denied" or "full" begins a fault, None ends it."""

    def _suffer(self) -> None:
        while (fault := _fault(self.root)) is not None:
            if fault == "down":
                raise StoreUnavailable.for_uri(self.uri, "no answer")
            if fault == "denied":
                raise AccessDenied.for_uri(self.uri, "not now")
            if fault == "full":
                raise OutOfSpace.for_uri(self.uri, "quota")
            time.sleep(0.01)

    def get(self, key: str) -> bytes:
        self._suffer()
        return super().get(key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._suffer()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        self._suffer()
        return super().put_if_absent(key, data)

    def put_buffers(self, key: str, buffers: Sequence[memoryview], sent: Callable[[int], None] | None = None) -> None:
        self._suffer()
        super().put_buffers(key, buffers, sent)

    def size(self, key: str) -> int | None:
        self._suffer()
        return super().size(key)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._suffer()
        yield from super().list(prefix)


def set_fault(store: LocalStore, fault: str | None) -> None:
    for known in _FAULTS:
        _flag(store.root, known).unlink(missing_ok=True)
    if fault is not None:
        _flag(store.root, fault).touch()


def _fault(root: Path) -> str | None:
    return next((fault for fault in _FAULTS if _flag(root, fault).exists()), None)


def _flag(root: Path, fault: str) -> Path:
    return root.parent / f"{root.name}.{fault}"


class ClockedStore(LocalStore):
    """A folder whose objects' ages go by `now`, which stands still until a test moves it; seconds from anywhere."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "now", 0.0)
        object.__setattr__(self, "_written", {})

    now: float
    _written: dict[str, float]

    def pass_(self, seconds: float) -> None:
        object.__setattr__(self, "now", self.now + seconds)

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self._written[key] = self.now

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        created = super().put_if_absent(key, data)
        if created:
            self._written[key] = self.now
        return created

    def age(self, key: str) -> float | None:
        return None if self.size(key) is None else self.now - self._written[key]


def silent_for(run: str, seconds: float) -> None:
    """The starts of the run in a folder have written nothing for so long."""
    then = time.time() - seconds
    for path in (Path(run) / "attempts").iterdir():
        os.utime(path, (then, then))
