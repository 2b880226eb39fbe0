"""A folder as an object store.

Content is written to a temporary file in the target's folder and flushed to the disk. Only then is the file renamed to
its target (`rename`). If it must not replace a file, it is linked instead: `link` fails if the name exists.
"""

import errno
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from data_service.store.base import TEMP_PREFIX, Entry, Store, check_key, join_path
from data_service.store.errors import (
    AccessDenied,
    BadUri,
    KeyMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
    Truncated,
)

_PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, quota, largest file size
_WRITE_BYTES = 16 << 20  # bytes per write call: small enough that a slow disk still reports progress
_CREATE_ATTEMPTS = 100  # attempts to create a file: a concurrent delete may remove its empty folder
_NO_LINK_ERRNOS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no hard links
_ABSENT_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # there is no file at the path


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Within the block, raise a full disk's OSError as OutOfSpace about `folder`, a temporary folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_ERRNOS:
            raise
        raise OutOfSpace.for_uri(str(folder), f"{error.strerror} (TMPDIR names the folder to use)") from error


@dataclass(frozen=True)
class LocalStore(Store):
    """A store whose objects are files below `root`, an absolute folder. The first write creates it. See `Store`."""

    root: Path

    @property
    def uri(self) -> str:
        return str(self.root)

    def with_prefix(self, prefix: str) -> "LocalStore":
        return LocalStore(self.root / check_key(self.uri, join_path(prefix, "")))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _translate_os_errors(path):
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with _translate_os_errors(path), path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), length, start)
            while len(data) < length:  # one read returns at most 2 GiB
                more = os.pread(file.fileno(), length - len(data), start + len(data))
                if not more:
                    raise Truncated.for_uri(str(path), start, length, os.fstat(file.fileno()).st_size)
                data += more
            return data

    def put_buffers(
        self, key: str, buffers: Sequence[memoryview], report_sent: Callable[[int], None] | None = None
    ) -> None:
        self._write_atomically(key, lambda file: _write_buffers(file, buffers, report_sent), os.replace)

    def put_file(self, key: str, path: Path) -> None:
        self._write_atomically(key, lambda file: _copy_file(path, file), os.replace)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        try:
            self._write_atomically(key, lambda file: _write_buffers(file, [memoryview(data)]), _link_into_place)
        except FileExistsError:
            return False
        return True

    def entry(self, key: str) -> Entry | None:
        path = self._path(key)
        try:
            with _translate_os_errors(path):
                status = path.stat()
        except KeyMissing:
            return None
        return None if stat.S_ISDIR(status.st_mode) else _to_entry(key, status)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder, _, start = prefix.rpartition("/")
        if folder:
            check_key(self.uri, folder)
        yield from _walk(self.root / folder, f"{folder}/" if folder else "", start)

    def folders(self) -> Iterator[str]:
        try:
            with _translate_os_errors(self.root), os.scandir(self.root) as found:
                names = [entry.name for entry in found if entry.is_dir()]
        except KeyMissing:
            return
        names.sort(key=lambda name: f"{name}/")
        yield from (name for name in names if any(_walk(self.root / name, "", "")))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with _translate_os_errors(path):
                path.unlink()
        except KeyMissing:
            return
        _remove_empty_folders(path.parent, self.root)

    def age(self, key: str) -> float | None:
        """Return the age by the file system's clock; a network file system's may differ from this machine's.

        In a read-only folder this machine's clock is used.
        """
        path = self._path(key)
        if self.size(key) is None:
            return None
        now = _file_system_time(path.parent)
        try:
            # Opening the file makes an NFS client ask its server; `stat` might return cached times.
            with _translate_os_errors(path), path.open("rb") as file:
                return max(0.0, now - os.fstat(file.fileno()).st_mtime)
        except KeyMissing:
            return None

    def remove_leftovers(self, folder: str, *, older_than_key: str | None) -> int:
        count = 0
        base = self.root / check_key(self.uri, join_path(folder, "")) if folder else self.root
        deadline = math.inf if older_than_key is None else self._write_time(older_than_key)
        for place, _, names in os.walk(base):
            for path in (Path(place, name) for name in names if name.startswith(TEMP_PREFIX)):
                # The file is missing if its writer has just renamed it.
                with _translate_os_errors(path), suppress(FileNotFoundError):
                    if path.stat().st_mtime < deadline:
                        path.unlink()
                        count += 1
            _remove_empty_folders(Path(place), self.root)
        return count

    def _write_time(self, key: str) -> float:
        """Return when the object was written, by the file system's clock; 0 if it is absent."""
        try:
            with _translate_os_errors(self._path(key)):
                return self._path(key).stat().st_mtime
        except KeyMissing:
            return 0.0

    def _path(self, key: str) -> Path:
        return self.root / check_key(self.uri, key)

    def _write_atomically(
        self, key: str, write_content: Callable[[int], None], publish: Callable[[Path, Path], None]
    ) -> None:
        """Write a temporary file by `write_content`, which gets its descriptor; then give it the object's name by
        `publish`, which gets the temporary and the final path."""
        target = self._path(key)
        with _translate_os_errors(target, writing=True):
            temporary, descriptor = _create_temporary_file(target.parent)
            try:
                try:
                    write_content(descriptor)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                publish(temporary, target)
                _flush_folder(target.parent)
            finally:
                temporary.unlink(missing_ok=True)


@contextmanager
def _translate_os_errors(path: Path, *, writing: bool = False) -> Iterator[None]:
    """Within the block, raise OSErrors about `path` as StoreErrors, except FileExistsError, which callers handle."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _PERMISSION_ERRNOS:
            raise AccessDenied.for_uri(str(path), reason) from error
        if error.errno in _FULL_ERRNOS:
            raise OutOfSpace.for_uri(str(path), reason) from error
        if error.errno in _ABSENT_ERRNOS and not writing:
            raise KeyMissing.for_uri(str(path)) from error
        if error.errno in (*_ABSENT_ERRNOS, errno.ENAMETOOLONG):
            raise BadUri.for_uri(str(path), f"cannot be written as a file ({reason})") from error
        raise StoreUnavailable.for_uri(str(path), reason) from error


def _create_temporary_file(folder: Path) -> tuple[Path, int]:
    for attempt in range(_CREATE_ATTEMPTS):
        path = folder / f"{TEMP_PREFIX}{uuid4().hex}"
        try:
            _make_folder(folder)
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:  # a concurrent delete removed the empty folder
            if attempt == _CREATE_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _file_system_time(folder: Path) -> float:
    """Return the file system's time in seconds since 1970: the modification time of a new file in `folder`."""
    path = folder / f"{TEMP_PREFIX}{uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(descriptor, b"\0")
            os.fsync(descriptor)
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
    except OSError:  # the folder is read-only, or the disk is full
        return time.time()


def _make_folder(folder: Path) -> None:
    """Create the folder and missing folders above it, and flush them to the disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(folder)) from None
    _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


def _write_buffers(
    descriptor: int, buffers: Sequence[memoryview], report_sent: Callable[[int], None] | None = None
) -> None:
    written = 0
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            count = os.write(descriptor, rest[:_WRITE_BYTES])
            rest, written = rest[count:], written + count
            if report_sent is not None:
                report_sent(written)


def _copy_file(source: Path, descriptor: int) -> None:
    with source.open("rb") as reader, os.fdopen(os.dup(descriptor), "wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)


def _link_into_place(temporary: Path, target: Path) -> None:
    """Give the temporary file the second name `target`. Raises FileExistsError: the target exists."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is in the way", str(target))
    try:
        os.link(temporary, target)
    except FileExistsError:
        # If NFS loses an answer, it repeats the request, which then finds our own link.
        with suppress(FileNotFoundError):
            if os.stat(temporary).st_nlink == 2:
                return
        raise
    except FileNotFoundError:
        # Another writer may have created the object and removed our older temporary file as a leftover.
        if not target.exists():
            raise
        raise FileExistsError(errno.EEXIST, "it was written meanwhile", str(target)) from None
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        raise StoreError(
            f"{target} cannot be created atomically, because its file system has no hard links",
            remedy="use another file system, or a URI of an object store (s3://, gs://, az://)",
        ) from error


def _walk(folder: Path, key_prefix: str, name_prefix: str) -> Iterator[Entry]:
    """Yield entries of the files below `folder` in key order.

    `key_prefix`: beginning of their keys, the key of `folder` with a slash. `name_prefix`: beginning of the names of
    files and folders directly in `folder`; others are left out.
    """
    try:
        with _translate_os_errors(folder), os.scandir(folder) as found:
            entries = [e for e in found if e.name.startswith(name_prefix) and not e.name.startswith(TEMP_PREFIX)]
    except KeyMissing:
        return
    named = sorted((entry.name + "/" * _is_folder(entry), entry) for entry in entries)
    for name, entry in named:
        if name.endswith("/"):
            if not (entry.is_symlink() and _is_loop(folder / entry.name)):
                yield from _walk(folder / entry.name, key_prefix + name, "")
            continue
        try:
            with _translate_os_errors(folder / name):
                status = entry.stat()
        except KeyMissing:
            continue  # the file was deleted meanwhile, or is a broken link
        yield _to_entry(key_prefix + name, status)


def _to_entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, f"{status.st_mtime_ns}-{status.st_ctime_ns}")


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_loop(link: Path) -> bool:
    """Return whether a link points to a folder above itself, so that following it would never end."""
    try:
        target = link.stat()
        return any(os.path.samestat(target, folder.stat()) for folder in link.parents)
    except OSError:  # the file was deleted meanwhile
        return False


def _remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove `folder` and its parents below `root` while they are empty: a store has no folders."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return  # the folder is not empty, or another process has removed it
        folder = folder.parent
