"""Starts of a run that were last heard of some time ago, by their store's clock."""

import os
import time
from pathlib import Path

from data_service.store.local import LocalStore


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
