"""Processes that die at a chosen system call, as a power cut or SIGKILL would have it."""

import os
from collections.abc import Callable
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
