"""Checks of process limits (`ulimit`): those that every command needs, and those of a command that starts Ray."""

import os
import resource

from data_service.errors import EnvironmentUnusable

_GIB = 1 << 30
_RAY_OPEN_FILES = 1024  # open files that one of Ray's processes needs
_RAY_THREADS = 512  # threads that Ray's processes and two ranks need
_COMMAND_THREADS = 32  # threads that a command needs, besides one for each core in Rust libraries
_MAX_COUNTED_THREAD_LIMIT = 4096  # above this limit, the user's threads are not counted, because counting is slow
_ULIMIT_UNIT_BYTES = {"-v": 1024, "-f": 1024}  # bytes in one unit of the `ulimit` option


def check_thread_limit(needed: int | None = None) -> None:
    """Raise EnvironmentUnusable if this user may not start `needed` threads (default: those that any command needs)."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:  # the kernel does not apply this limit to root
        return
    if needed is None:
        if soft > _MAX_COUNTED_THREAD_LIMIT:
            return
        needed = _COMMAND_THREADS + (os.cpu_count() or 1)
    _ensure_limit("-u", soft, "processes and threads of a user", _user_threads() + needed)


def check_process_limits(object_store: int = 0) -> None:
    """Raise EnvironmentUnusable, which names the limit and the needed value, if a limit is too low for Ray.

    The soft limit of open files is raised to the needed value.

    `object_store`: bytes of Ray's object store, a file that every process maps.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _RAY_OPEN_FILES and (hard >= _RAY_OPEN_FILES or hard < 0):  # RLIM_INFINITY is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (_RAY_OPEN_FILES, hard))
    # Even a rank of a tiny run maps 2.6 GB of virtual memory.
    needs = [
        ("-n", resource.RLIMIT_NOFILE, "open files", _RAY_OPEN_FILES),
        ("-v", resource.RLIMIT_AS, "virtual memory", 3 * _GIB + object_store),
        ("-f", resource.RLIMIT_FSIZE, "the size of a file", max(_GIB, object_store)),
    ]
    for option, kind, what, need in needs:
        _ensure_limit(option, resource.getrlimit(kind)[0], what, need)
    check_thread_limit(_RAY_THREADS)


def _ensure_limit(option: str, soft: int, what: str, need: int) -> None:
    if soft != resource.RLIM_INFINITY and soft < need:
        unit = _ULIMIT_UNIT_BYTES.get(option, 1)
        raise EnvironmentUnusable(
            f"the limit on {what} is {soft // unit} (ulimit {option}); this command needs {need // unit}",
            remedy=f"ulimit {option} {need // unit} before the command, or ulimit {option} unlimited",
        )


def _user_threads() -> int:
    """Return the number of threads of this user."""
    import psutil  # imported here, because most commands do not need it

    found = psutil.process_iter(["uids", "num_threads"])
    own = (one.info for one in found if one.info["uids"] and one.info["uids"].real == os.getuid())
    return sum(one["num_threads"] or 0 for one in own)
