"""Processes as the kernel tells them apart, and temporary folders that end with their process, however it ends.

No wall clock is read: that may be set while a run lives. A process that was killed leaves its temporary folder behind;
the next process of ours that needs one removes it.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STARTED_HERE = "maskfleet-started-here"
"""A file in the log folder of a Ray that a command of ours has started: so its processes are known to be ours."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """The kernel's name of this boot, the same in all containers of a machine. Empty where /proc has none."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def namespace() -> str:
    """The table in which this process's numbers are those of processes: its container's, or the machine's."""
    return os.readlink("/proc/self/ns/pid") if _BOOT.exists() else ""


def table() -> str:
    """Machine, boot and namespace: two processes with the same of it and the same number are one process, or one after
    the other."""
    return " ".join(part for part in (socket.gethostname(), boot(), namespace()) if part)


def since_boot() -> float:
    """Seconds since boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started(pid: int) -> int:
    """When a process of this namespace began, in clock ticks since boot. 0 if there is none, or it has ended and waits
    to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def age_s(pid: int) -> float:
    """Seconds since a process of this namespace began."""
    return since_boot() - started(pid) / os.sysconf("SC_CLK_TCK")


_PREFIX = "maskfleet-temporary-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW  # anyone may put a link among temporary files


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """No other process of this machine has the lock on `path` meanwhile: on a folder, or on a file that is made if need
    be. The lock ends with this process, however it ends.

    Raises BlockingIOError: another has it, and `wait` is False. OSError: `path` cannot be opened.
    """
    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    lock = _lock(path, kind, wait=wait)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, flags: int, *, wait: bool) -> int:
    """An open file that has the lock on itself, until it is closed."""
    lock = os.open(path, flags, mode=0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """An empty folder where this machine keeps temporary files, gone when the context ends. `what`: for its name.

    Its process holds a lock on it, so it is known which folders are nobody's.
    """
    _remove_orphans(Path(tempfile.gettempdir()))
    folder, lock = _made(what)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(what: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{what}-"))
        with suppress(FileNotFoundError):  # removed as an orphan before it was locked
            lock = _lock(folder, _FOLDER, wait=True)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_orphans(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody's, or gone already
            if folder.lstat().st_uid == os.geteuid():
                lock = _lock(folder, _FOLDER, wait=False)
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)
