"""A stored object as a file: read by ranges of a few MiB, so memory does not depend on its size."""

import io
from functools import lru_cache
from typing import BinaryIO, cast

from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB
from data_service.store.base import Store
from data_service.store.open import open_store

_CHUNK = 4 * MIB


class _RangedFile(io.RawIOBase):
    """Seekable and read-only. Every read is one ranged get, which the store retries."""

    def __init__(self, file: InputFile) -> None:
        self._store = _store_at(file.root)
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        length = max(0, min(len(view), self._file.size - self._position))
        if length:
            view[:length] = self._store.get_range(self._file.key, self._position, length)
        self._position += length
        return length


@lru_cache(maxsize=16)
def _store_at(root: str) -> Store:
    """One connection for all files of a folder: opening one to S3 takes longer than reading a small file."""
    return open_store(root)


def open_ranged(file: InputFile, *, start: int = 0, chunk: int = _CHUNK) -> BinaryIO:
    """The file's stored bytes, from byte `start` on; `chunk` bytes are fetched at a time.

    Raises:
        KeyMissing, Truncated: on reading, where the file is gone or shorter than when it was listed.
    """
    stream = io.BufferedReader(_RangedFile(file), buffer_size=max(1, min(chunk, file.size)))
    stream.seek(start)
    return cast(BinaryIO, stream)


def line_start(file: InputFile, position: int) -> int:
    """Where the line that holds byte `position` begins, found by reading backwards."""
    store = _store_at(file.root)
    stop = position
    while stop > 0:
        start = max(0, stop - 64 * 1024)
        newline = store.get_range(file.key, start, stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0
