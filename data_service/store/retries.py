"""How often this process has had to ask a store again: for whoever watches how well a store answers."""

import threading

_lock = threading.Lock()
_total = 0


def count() -> None:
    """A request failed in a way that may pass, and is made again."""
    global _total
    with _lock:
        _total += 1


def total() -> int:
    """Since the process began."""
    return _total
