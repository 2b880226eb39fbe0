"""This process struck: dead before a chosen system call, out of disk, its threads switched all the time."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CALLS = ("open", "write", "fsync", "replace", "link", "unlink", "rmdir", "mkdir")
_DIED, _FAILED = 9, 10


def dies_at(call: int, work: Callable[[], object]) -> bool:
    """Runs `work` in a copy of this process that dies right before its `call`-th file-system change.

    Returns whether it died; False if `work` was done with fewer calls. Raises if `work` raises.
    """
    child = os.fork()
    if child == 0:
        _run(call, work)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, _DIED):
        raise RuntimeError(f"the process failed with status {status}, see its output above")
    return status == _DIED


def _run(call: int, work: Callable[[], object]) -> None:
    status = _FAILED
    left = [call]
    try:
        for name in _CALLS:
            setattr(os, name, _counted(getattr(os, name), left))
        work()
        status = 0
    finally:
        os._exit(status)


def _counted(function: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os._exit(_DIED)
        return function(*args, **kwargs)

    return counted


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: what a full disk does, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def switching_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
