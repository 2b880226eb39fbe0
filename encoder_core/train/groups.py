"""The process groups of this process: how it leaves them, and how it gets away from sums that will never end.

If a rank dies, gloo raises on the others. NCCL does not: its kernels wait on the GPU, and so does everything that waits
for the GPU, until the communicators are aborted. What a kernel leaves behind then is garbage. So `abort_groups` may be
called from a thread that does not wait, and `ensure_not_aborted` stands before every exchange of figures between ranks:
nothing computed from garbage is recorded, compared or saved.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from encoder_core.layers.torch_internals import nccl_backends

_aborted = threading.Event()
_lock = threading.Lock()
_leave_count = 0


class GroupsAborted(RuntimeError):
    """The error of a rank that must leave its groups, because its sums with other ranks have been aborted."""


def ensure_not_aborted() -> None:
    """Raise GroupsAborted if this process has aborted its groups."""
    if _aborted.is_set():
        raise GroupsAborted("the sums with other ranks were aborted")


def leave_count() -> int:
    """Return how often this process has left its groups."""
    return _leave_count


def abort_groups(left: int | None = None) -> None:
    """End all NCCL collectives of this process. Whoever waits for them goes on, and raises at the next collective or
    exchange of figures. May be called from any thread, and again. Ranks on CPUs need it only to raise sooner.

    `left`: `leave_count` when the groups to be aborted were joined, or before; nothing happens if they have been left.

    Raises LibraryChanged if torch lacks a private name that we use.
    """
    with _lock:
        if left not in (None, _leave_count):
            return
        _aborted.set()
        # A communicator frees its memory only when no kernel of any communicator runs, so all are aborted together.
        threads = [threading.Thread(target=backend.abort, daemon=True) for backend in nccl_backends()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextmanager
def abort_groups_on_error() -> Iterator[None]:
    """Abort the groups of this process if the block raises. What is closed afterwards need not wait for other ranks."""
    try:
        yield
    except BaseException:
        abort_groups()
        raise


def groups_failed() -> bool:
    """Return whether NCCL has noticed an error in a group of this process: another rank is gone, or the network is.
    NCCL notices nothing on ranks of one machine, which share memory."""
    if _aborted.is_set() or not _lock.acquire(blocking=False):
        return False
    try:
        return any(int(backend.get_error()) for backend in nccl_backends())
    finally:
        _lock.release()


@contextmanager
def leaving_groups() -> Iterator[None]:
    """Let no thread abort the groups of this process while the block leaves them. Then the process can join others."""
    global _leave_count
    with _lock:
        yield
        _leave_count += 1
        _aborted.clear()
