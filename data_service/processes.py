"""Identities of processes, and temporary folders that are removed after their process ended.

No wall clock is read, because it may be set while a run is alive. If a process is killed, its temporary folder remains;
the next of our processes that needs a temporary folder removes it.
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

from data_service.errors import EnvironmentUnusable

COMMAND_VARIABLE = "MASKFLEET_COMMAND"
"""Environment variable with the name of the command that a process belongs to (`command_name`)."""
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's id of this boot, the same in all containers of a machine; empty if /proc does not have it."""
    return _BOOT_ID_FILE.read_text().strip() if _BOOT_ID_FILE.exists() else ""


def pid_namespace() -> str:
    """Return the id of the process namespace in which this process's pids are valid: the container's or machine's."""
    return os.readlink("/proc/self/ns/pid") if _BOOT_ID_FILE.exists() else ""


def process_namespace_name() -> str:
    """Return host, boot id and pid namespace as text. Within one of them, a pid names one process at a time."""
    return " ".join(part for part in (socket.gethostname(), boot_id(), pid_namespace()) if part)


def seconds_since_boot() -> float:
    """Return seconds since boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start_ticks(pid: int) -> int:
    """Return when the process `pid` of this namespace began, in clock ticks since boot.

    0 if there is no such process, or if it has ended and waits to be reaped.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def process_age_s(pid: int) -> float:
    """Return the seconds since the process `pid` of this namespace began."""
    return seconds_since_boot() - process_start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def command_name() -> str:
    """Return the name of the command that started this process (`COMMAND_VARIABLE`), else a name of this process: its
    pid, start time, namespace and boot."""
    own = f"{os.getpid()}-{process_start_ticks(os.getpid())}-{pid_namespace()}-{boot_id()}"
    return os.environ.get(COMMAND_VARIABLE) or own


def may_process_exist(name: str) -> bool:
    """Return False if the process that a `command_name` names has certainly ended. Processes of other namespaces cannot
    be looked up here, so for them, and for malformed names, return True."""
    pid, _, rest = name.partition("-")
    start, _, place = rest.partition("-")
    if not pid.isdecimal() or not start.isdecimal() or place != f"{pid_namespace()}-{boot_id()}":
        return True
    return process_start_ticks(int(pid)) == int(start)


def _ray_folder() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def mark_ray_session() -> None:
    """Record the command of the Ray session that this process is about to start, in a file whose name ends with this
    process's pid, as the name of the session's folder will."""
    (_ray_folder() / f"{_RAY_PREFIX}{os.getpid()}").write_text(command_name())


def is_recorded_ray_session(folder: Path) -> bool:
    """Return whether a command of ours has recorded that it starts the Ray session in `folder`."""
    return (folder.parents[1] / f"{_RAY_PREFIX}{folder.name.rpartition('_')[2]}").exists()


def remove_ray_sessions(ended_command: str = "") -> None:
    """Remove the folders of Ray sessions on this machine whose command has ended, or is `ended_command`."""
    for mark in _ray_folder().glob(f"{_RAY_PREFIX}*"):
        with suppress(OSError):  # the record was removed by another command, or belongs to another user
            owner = mark.read_text()
            if owner == ended_command or not may_process_exist(owner):
                for session in _ray_folder().glob(f"ray/session_*_{mark.name.removeprefix(_RAY_PREFIX)}"):
                    shutil.rmtree(session, ignore_errors=True)
                mark.unlink()


_RAY_PREFIX = "maskfleet-ray-"  # first part of the names of files that `mark_ray_session` writes
_TEMPORARY_PREFIX = "maskfleet-temporary-"
_FOLDER_VARIABLES = ("TMPDIR", "RAY_TMPDIR")  # each names a folder for temporary files
_TEST_FILE_BYTES = 4096  # bytes of a test file: on a full disk an empty file can still be written
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW  # other users may put links into /tmp


def _lock(path: Path, flags: int, *, wait: bool) -> int:
    """Open and lock a file; return its descriptor. The lock lasts until the descriptor is closed."""
    lock = os.open(path, flags, mode=0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(lock)
        raise
    return lock


def temporary_root() -> Path:
    """Return the folder for temporary files.

    Python passes over a folder of TMPDIR that cannot be written and takes /tmp; Ray and other libraries do not.

    Raises EnvironmentUnusable: files cannot be written in a folder that the environment names for them.
    """
    for variable in _FOLDER_VARIABLES:
        if given := os.environ.get(variable):
            try:
                with tempfile.TemporaryFile(dir=given) as file:
                    file.write(b"\0" * _TEST_FILE_BYTES)
            except OSError as error:
                raise EnvironmentUnusable(
                    f"{variable}={given}: temporary files cannot be written there: {error.strerror or error}",
                    remedy=f"make room there or allow writing, or set {variable} to another folder",
                ) from error
    return Path(tempfile.gettempdir())


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield an empty temporary folder, which is removed at the end of the block. Its name contains `purpose`.

    The process holds a lock on the folder, so folders of processes that have ended can be recognised.

    Raises EnvironmentUnusable: as `temporary_root`.
    """
    _remove_orphaned_folders(temporary_root())
    folder, lock = _create_locked_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _create_locked_folder(name_part: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY_PREFIX}{name_part}-"))
        # Another process may have removed the folder as an orphan before it was locked.
        with suppress(FileNotFoundError):
            lock = _lock(folder, _OPEN_FOLDER_FLAGS, wait=True)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_orphaned_folders(place: Path) -> None:
    for folder in place.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):  # a running process holds the folder's lock, or the folder is gone
            if folder.lstat().st_uid == os.geteuid():
                lock = _lock(folder, _OPEN_FOLDER_FLAGS, wait=False)
                try:
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)
