"""Leaves the torch.distributed groups of this process, and aborts collectives that will never end.

If a rank dies, gloo raises an error on the other ranks. NCCL does not: its kernels wait on the GPU, and so does all
code that waits for the GPU, until the communicators are aborted. Aborted kernels leave garbage as results. So another
thread may call `abort_groups`, and `ensure_not_aborted` runs before every exchange of figures between ranks: nothing
computed from garbage is recorded, compared or saved.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from encoder_core.layers.torch_internals import nccl_backends

_aborted = threading.Event()  # set while this process has aborted groups that it has not yet left
_lock = threading.Lock()  # held while groups are aborted, left or checked for errors
_leave_count = 0


class GroupsAborted(RuntimeError):
    """The collectives of this process were aborted, so it must leave its process groups."""


def ensure_not_aborted() -> None:
    """Raise GroupsAborted if this process has aborted its groups."""
    if _aborted.is_set():
        raise GroupsAborted("the collectives with other ranks were aborted")


def leave_count() -> int:
    """Return how often this process has left its process groups."""
    return _leave_count


def abort_groups(left: int | None = None) -> None:
    """Abort all NCCL collectives of this process. Threads that wait for them continue, and raise at the next collective
    or exchange of figures. Any thread may call this, repeatedly. On CPUs it only makes ranks raise sooner.

    `left`: `leave_count` when the groups were joined; nothing happens if they have been left since. None: always abort.

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
    """Abort the groups of this process if the block raises, so that closing them does not wait for other ranks."""
    try:
        yield
    except BaseException:
        abort_groups()
        raise


def groups_failed() -> bool:
    """Return whether NCCL reports an error in a group of this process, because another rank or the network failed.
    NCCL reports no errors between ranks of one machine, which use shared memory."""
    if _aborted.is_set() or not _lock.acquire(blocking=False):
        return False
    try:
        return any(int(backend.get_error()) for backend in nccl_backends())
    finally:
        _lock.release()


@contextmanager
def leaving_groups() -> Iterator[None]:
    """Leave the groups inside the block, while no other thread can abort them. Then the process can join others."""
    global _leave_count
    with _lock:
        yield
        _leave_count += 1
        _aborted.clear()
