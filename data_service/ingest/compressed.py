"""The text inside .gz and .zst files as a stream. Damage and truncation are errors, never a shorter text."""

import gzip
import io
import zlib
from typing import BinaryIO, cast

import pyarrow as pa

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.ranged import open_ranged
from data_service.ingest.splits import Piece

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


def open_piece(piece: Piece, start: int) -> BinaryIO:
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
    """Arrow's reader, because it hands out little at a time, however much a few bytes stand for, keeps at most the
    window of 128 MiB that `zstd` itself allows by default, and takes no truncated file for a complete one.
    """

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
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
