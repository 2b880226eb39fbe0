"""The limits of a process, as `ulimit` shows them, that any command needs, or one with a Ray of its own."""

import os
import resource

from data_service.errors import EnvironmentUnusable

_GIB = 1 << 30
_FILES = 1024  # open files of one of Ray's processes
_RAY_THREADS = 512  # of Ray's processes and two ranks
_COMMAND_THREADS = 32  # beside one a core, which libraries in Rust start
_COUNTED_THREADS = 4096  # a limit that is higher is not compared before each command: counting takes a while
_UNITS = {"-v": 1024, "-f": 1024}  # bytes in which `ulimit` counts


def ensure_threads(needed: int | None = None) -> None:
    """Raise EnvironmentUnusable if this user may not start so many threads; by default, those of any command."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:  # the kernel does not hold root to it
        return
    if needed is None:
        if soft > _COUNTED_THREADS:
            return
        needed = _COMMAND_THREADS + (os.cpu_count() or 1)
    _ensure("-u", soft, "processes and threads of a user", _threads() + needed)


def ensure_limits(object_store: int = 0) -> None:
    """Raise EnvironmentUnusable if a limit is too low, with its name and the value that is needed.

    The soft limit of open files is raised to that value.

    `object_store`: bytes of Ray's object store, which every process maps and which is a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES and (hard >= _FILES or hard < 0):  # RLIM_INFINITY is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))
    needs = [
        ("-n", resource.RLIMIT_NOFILE, "open files", _FILES),
        (
            "-v",
            resource.RLIMIT_AS,
            "virtual memory",
            3 * _GIB + object_store,
        ),  # a rank of a tiny run has 2.6 GB
        ("-f", resource.RLIMIT_FSIZE, "the size of a file", max(_GIB, object_store)),
    ]
    for option, kind, what, need in needs:
        _ensure(option, resource.getrlimit(kind)[0], what, need)
    ensure_threads(_RAY_THREADS)


def _ensure(option: str, soft: int, what: str, need: int) -> None:
    if soft != resource.RLIM_INFINITY and soft < need:
        unit = _UNITS.get(option, 1)
        raise EnvironmentUnusable(
            f"the limit on {what} is {soft // unit} (ulimit {option}); this command needs {need // unit}",
            remedy=f"ulimit {option} {need // unit} before the command, or ulimit {option} unlimited",
        )


def _threads() -> int:
    """Return the number of threads of this user."""
    import psutil  # most commands need not wait for it

    found = psutil.process_iter(["uids", "num_threads"])
    own = (one.info for one in found if one.info["uids"] and one.info["uids"].real == os.getuid())
    return sum(one["num_threads"] or 0 for one in own)
