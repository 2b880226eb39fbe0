"""A store with a clock of its own, which stands still until a test moves it."""

from pathlib import Path

from data_service.store.local import LocalStore


class ClockedStore(LocalStore):
    """A folder whose objects' ages go by `now`, seconds from anywhere."""

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
