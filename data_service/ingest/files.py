"""A stored object as a file, with the text inside .gz and .zst files as a stream.

Files are read by ranges of a few MiB, so memory does not depend on their size. Damaged or truncated compressed data is
an error, never a shorter text.
"""

import gzip
import io
import zlib
from functools import lru_cache
from typing import BinaryIO, cast

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB
from data_service.ingest.splits import FilePiece
from data_service.store.base import Store
from data_service.store.open import open_store

_CHUNK = 4 * MIB
_BUFFER = 1 << 20


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
    """The first byte of the line that holds byte `position`, found by reading backwards."""
    store = _store_at(file.root)
    stop = position
    while stop > 0:
        start = max(0, stop - 64 * 1024)
        newline = store.get_range(file.key, start, stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def open_text(file: InputFile, *, start: int = 0) -> BinaryIO:
    """The file's bytes, decompressed. `start` skips that many bytes and is for uncompressed files only.

    Raises:
        InputError: on reading, where the compressed data is damaged or ends early.
    """
    if file.compression == "":
        return open_ranged(file, start=start)
    raw = open_ranged(file)
    plain: io.RawIOBase = _Gzip(raw, file) if file.compression == "gz" else _Zstd(raw, file)
    return cast(BinaryIO, io.BufferedReader(plain, buffer_size=_BUFFER))


def open_piece(piece: FilePiece, start: int) -> BinaryIO:
    """The text of a piece from byte `start` of its file on: what was handed over, or else read from the file.

    Raises:
        InputError: as `open_text`.
    """
    if piece.text is not None:
        return io.BytesIO(piece.text)
    assert not piece.plain_size, "a streamed piece is read by PieceReader"
    return open_text(piece.file, start=start)


class _Gzip(io.RawIOBase):
    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        self._plain = gzip.GzipFile(fileobj=raw, mode="rb")
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        try:
            return self._plain.readinto(buffer)  # type: ignore[arg-type]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _damaged(self._file, str(error)) from error


class _Zstd(io.RawIOBase):
    """Decompression by Arrow's reader, because it returns little at a time even if a few bytes expand to much, keeps at
    most the window of 128 MiB that `zstd` itself allows by default, and does not take a truncated file for a complete
    one.
    """

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        import pyarrow as pa  # as large as all the rest: only where something is compressed so

        self._plain = pa.CompressedInputStream(raw, "zstd")
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        try:
            return int(self._plain.readinto(buffer))
        except OSError as error:
            if "too much memory" in str(error):
                raise InputError(
                    f"{self._file.uri}: needs a window of more than 128 MiB to decompress",
                    remedy="compress it again without --long or --ultra, or with --long=27",
                ) from error
            raise _damaged(self._file, str(error)) from error


def _damaged(file: InputFile, reason: str) -> InputError:
    return InputError(
        f"{file.uri}: damaged or truncated {file.compression} data: {reason}",
        remedy="fetch or compress the file again; no document of it was used",
    )
