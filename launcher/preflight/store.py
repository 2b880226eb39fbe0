"""A store tried out: what a run does to it, once each, and by how much its clock differs from ours."""

import time

from data_service.store.base import Store


def exercise(store: Store, key: str) -> str:
    """What the store gets wrong; empty if nothing. Leaves nothing behind. Raises StoreError."""
    try:
        if not store.put_if_absent(key, b"first") or store.put_if_absent(key, b"second"):
            return "a conditional put does not protect what exists"
        if store.get(key) != b"first" or store.get_range(key, 1, 3) != b"irs":
            return "what was put is not what is read"
        if [entry.size for entry in store.list(key)] != [5]:
            return "a listing does not show what was just put"
    finally:
        store.delete(key)
    return "" if store.size(key) is None else "a deleted object is still there"


def skew(store: Store) -> float | None:
    """Seconds this machine's clock is ahead of the store's, to about a second; None if it has no clock of its own."""
    before = time.time()
    theirs = store.clock()
    return (
        None if theirs is None else (before + time.time()) / 2 - (theirs + 0.5)
    )  # a Date says whole seconds
