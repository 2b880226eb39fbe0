"""The last few results of a function, for any number of threads."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentResults(Generic[K, V]):
    """Remembers the `most` results that were made last.

    Threads share it without a lock: what is remembered is never changed, only replaced by another mapping. Two threads
    that miss at once both compute, and one result may be forgotten early. It can be pickled, unlike functools' cache.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: Mapping[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The result for `key`, made if it is not remembered."""
        kept = self._kept
        if key in kept:
            return kept[key]
        value = make()
        self._kept = dict([*self._kept.items(), (key, value)][-self._most :])
        return value
