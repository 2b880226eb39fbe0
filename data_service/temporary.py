"""Temporary folders that end with their process, however it ends. One that was killed leaves its folder behind; the
next process of ours that needs one removes it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "maskfleet-temporary-"


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """An empty folder where this machine keeps temporary files, gone when the context ends. `what`: for its name.

    Its process holds a lock on it, which ends with the process: so it is known which folders are nobody's.
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
            lock = _opened(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_orphans(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody's, or gone already
            lock = _opened(folder)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
