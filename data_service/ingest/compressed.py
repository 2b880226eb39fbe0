"""The text inside .gz and .zst files as a stream. Damage and truncation are errors, never a shorter text."""

import gzip
import io
import zlib
from typing import BinaryIO, cast

import zstandard

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.ranged import open_ranged

_FEED = 64 * 1024
_LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes
_BUFFER = 1 << 20


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
    """One frame after another. The library's own stream reader takes a truncated file for a complete one."""

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        self._raw = raw
        self._file = file
        self._library = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._plain and self._decompress():
            pass
        length = min(len(view), len(self._plain))
        view[:length] = self._plain[:length]
        self._plain = self._plain[length:]
        return length

    def _decompress(self) -> bool:
        """Turn some more compressed bytes into text; False at the end of the file."""
        data = self._compressed or self._raw.read(_FEED)
        self._compressed = b""
        if not data:
            if self._frame is not None:
                raise _damaged(self._file, "the file ends inside a compressed frame")
            return False
        if self._frame is None:
            self._frame = self._library.decompressobj()
        try:
            self._plain = memoryview(self._frame.decompress(data))
        except zstandard.ZstdError as error:
            raise _damaged(self._file, str(error)) from error
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = None
        return True


def _damaged(file: InputFile, reason: str) -> InputError:
    return InputError(
        f"{file.uri}: damaged or truncated {file.compression} data: {reason}",
        remedy="fetch or compress the file again; no document of it was used",
    )
