"""A cache of the last few results of a function, for any number of threads."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentResults(Generic[K, V]):
    """A cache that keeps the newest results, at most `most` of them.

    Threads share it without a lock: its mapping is never changed, only replaced. If two threads miss at the same time,
    both compute, and one result may be dropped early. Unlike functools' cache it can be pickled.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: Mapping[K, V] = {}

    def get(self, key: K, compute: Callable[[], V]) -> V:
        """Return the cached result for `key`; if there is none, call `compute` and keep its result."""
        kept = self._kept
        if key in kept:
            return kept[key]
        value = compute()
        self._kept = dict([*self._kept.items(), (key, value)][-self._most :])
        return value
