"""Opens stored objects as files, and their text as a stream: decompressed and converted to UTF-8.

Files are read by ranges of a few MiB, so memory does not depend on their size. Damaged or truncated compressed data is
an error, never a shorter text.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, BinaryIO, assert_never, cast

import zstandard

from data_service.errors import InputError
from data_service.ingest.encodings import MAX_BOM_BYTES, UTF_8, ReadableStream, Utf8Stream, encoding_from_bom
from data_service.ingest.file_kinds import Compression
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import MIB
from data_service.store.base import Store
from data_service.store.open import open_store

_FETCH_CHUNK_BYTES = 4 * MIB  # usual read request to a store
_MIN_REQUEST_BYTES = 64 * 1024  # smallest read request to a store
_BUFFER_BYTES = 1 << 20  # buffer of a stream of decompressed or converted text
_ARROW_WINDOW_BYTES, _MAX_WINDOW_BYTES = 128 * MIB, 2048 * MIB  # largest zstd window for Arrow's reader; for zstandard
_FRAME_HEADER_BYTES, _ZSTD_INPUT_BYTES = 18, 4096  # largest zstd frame header; input that may expand to 128 MiB
_NARROWER_WINDOW_REMEDY = "compress it again without --long or --ultra, or with --long=27"
_XZ_MEMORY_BYTES = 256 * MIB  # limit for decompression; `xz -9` needs 65 MiB

SMALL_FILE_BYTES = 256 * 1024  # files of at most so many bytes are fetched whole, ahead of time
_fetched: dict[InputFile, bytes] = {}  # contents of files that were fetched ahead


def fetch_small_file(file: InputFile) -> bytes:
    """Return all bytes of a small file. Raises KeyMissing, Truncated: it is gone, or shorter than when listed."""
    return _open_store_cached(file.root).get_range(file.key, 0, file.size) if file.size else b""


@contextmanager
def use_fetched_bytes(file: InputFile, data: bytes) -> Iterator[None]:
    """Serve reads of `file` from `data`, all of its bytes, until the `with` block ends."""
    _fetched[file] = data
    try:
        yield
    finally:
        _fetched.pop(file, None)


class _RangedFile(ReadableStream):
    """A seekable read-only file on a stored object. Every read is one ranged get, which the store retries, unless the
    file was fetched before (`use_fetched_bytes`)."""

    def __init__(self, file: InputFile) -> None:
        self._held = _fetched.get(file)
        self._store = _open_store_cached(file.root)
        self._file = file
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read_some(self, size: int) -> bytes:
        start, length = self._position, max(0, min(size, self._file.size - self._position))
        self._position += length
        if self._held is not None:
            return self._held[start : start + length]
        return self._store.get_range(self._file.key, start, length) if length else b""


@lru_cache(maxsize=16)
def _open_store_cached(root: str) -> Store:
    """Return the store of a folder. Its files share it, because connecting to S3 takes longer than a small read."""
    return open_store(root)


def open_stored_bytes(file: InputFile, *, start: int = 0, chunk_bytes: int = _FETCH_CHUNK_BYTES) -> BinaryIO:
    """Return a stream of the file's stored bytes from byte `start` on. `chunk_bytes`: bytes of one request.

    Raises:
        KeyMissing, Truncated: on reading: the file is gone, or shorter than when it was listed.
    """
    stream = io.BufferedReader(_RangedFile(file), buffer_size=max(1, min(chunk_bytes, file.size)))
    stream.seek(start)
    return cast(BinaryIO, stream)


def line_start(file: InputFile, position: int, within: int | None = None) -> int | None:
    """Return the offset of the first byte of the line that holds byte `position`, found by reading backwards;
    None if the line begins more than about `within` bytes before `position`."""
    store = _open_store_cached(file.root)
    stop = position
    while stop > 0:
        if within is not None and stop <= position - within:
            return None
        start = max(0, stop - 64 * 1024)
        newline = store.get_range(file.key, start, stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def open_text(file: InputFile, *, start: int = 0, expected_bytes: int = _FETCH_CHUNK_BYTES) -> BinaryIO:
    """Return a stream of the file's text, decompressed, in UTF-8. A byte order mark of UTF-8 is kept, so that offsets
    are those in the file.

    `start`: number of bytes to skip; only for files whose text is stored plainly (`is_uncompressed_utf8`).
    `expected_bytes`: approximate number of bytes that will be read, so that few more are fetched.

    Raises:
        InputError: here or on a later read: the compressed data is damaged or truncated.
    """
    if start:
        return open_stored_bytes(
            file, start=start, chunk_bytes=min(_FETCH_CHUNK_BYTES, max(_MIN_REQUEST_BYTES, expected_bytes))
        )
    raw = open_decompressed(file)
    head = raw.read(MAX_BOM_BYTES)
    if file.compression == "" and (encoding_from_bom(head) or file.encoding) == UTF_8:
        raw.seek(0)
        return raw
    return cast(BinaryIO, io.BufferedReader(Utf8Stream(raw, head, file.encoding), buffer_size=_BUFFER_BYTES))


def open_decompressed(file: InputFile) -> BinaryIO:
    """Return a stream of the file's bytes, decompressed. Raises the errors of `open_text`."""
    return decompress(open_stored_bytes(file), file)


def decompress(raw: BinaryIO, file: InputFile) -> BinaryIO:
    """Return a decompressed stream of `raw`, the stored bytes of a file. Raises the errors of `open_text`."""
    # Even an empty text has a header when compressed, but the gzip and zstd libraries accept a file without bytes.
    if file.compression and not cast(io.BufferedReader, raw).peek(1):
        raise _damaged_file_error(file, "it has no bytes")
    match file.compression:
        case "":
            return raw
        case "gz":
            plain: io.RawIOBase = _CheckedStream(gzip.GzipFile(fileobj=raw, mode="rb"), file)
        case "zst":
            plain = _open_zstd(raw, file)
        case "bz2" | "xz":
            plain = _ConcatenatedStreams(raw, file)
        case other:
            assert_never(other)
    return cast(BinaryIO, io.BufferedReader(plain, buffer_size=_BUFFER_BYTES))


def to_utf8_stream(raw: BinaryIO, declared: str) -> BinaryIO:
    """Return the text of `raw` as a UTF-8 stream. `declared`: its encoding, unless a byte order mark names another."""
    head = raw.read(MAX_BOM_BYTES)
    return cast(BinaryIO, io.BufferedReader(Utf8Stream(raw, head, declared), buffer_size=_BUFFER_BYTES))


@lru_cache(maxsize=1024)
def is_uncompressed_utf8(file: InputFile) -> bool:
    """Return whether the text is stored uncompressed and in UTF-8, so that it can be cut at any line. This
    reads the file's first bytes."""
    if file.compression or file.encoding != UTF_8:
        return False
    with open_stored_bytes(file, chunk_bytes=MAX_BOM_BYTES) as stream:
        return encoding_from_bom(stream.read(MAX_BOM_BYTES)) in (None, UTF_8)


class _CheckedStream(ReadableStream):
    """Wraps a decompression stream of a library, so that its errors name the file."""

    def __init__(self, plain: Any, file: InputFile) -> None:
        self._plain, self._file = plain, file

    def readinto(self, buffer: object) -> int:
        try:
            return int(self._plain.readinto(buffer))
        except (OSError, EOFError, zlib.error) as error:
            if "too much memory" in str(error):
                raise InputError(
                    f"{self._file.uri} needs a window of more than 128 MiB to be decompressed",
                    remedy=_NARROWER_WINDOW_REMEDY,
                ) from error
            raise _damaged_file_error(self._file, str(error)) from error


def _open_zstd(raw: BinaryIO, file: InputFile) -> io.RawIOBase:
    """Return a decompressed stream. Raises InputError: the first frame's window exceeds half of the free memory.

    Arrow's reader needs little memory even if a few bytes expand to many, and it reports a truncated file. But it
    accepts only windows of up to 128 MiB, the default limit of `zstd`.
    """
    try:
        head = cast(io.BufferedReader, raw).peek(_FRAME_HEADER_BYTES)
        window = zstandard.get_frame_parameters(head[:_FRAME_HEADER_BYTES]).window_size
    except zstandard.ZstdError:  # Arrow's reader will raise the error for this file
        window = 0
    if not _ARROW_WINDOW_BYTES < window <= _MAX_WINDOW_BYTES:
        import pyarrow as pa  # imported late, because it is as large as all other libraries together

        return _CheckedStream(pa.CompressedInputStream(raw, "zstd"), file)
    import psutil  # imported here because few files have a window of more than 128 MiB

    if window > (free := psutil.virtual_memory().available) // 2:
        raise InputError(
            f"{file.uri} needs a window of {window // MIB:,} MiB to be decompressed, but only {free // MIB:,} are free",
            remedy=f"free memory or use fewer --workers; or {_NARROWER_WINDOW_REMEDY}",
        )
    return _LargeWindowZstd(raw, file)


class _LargeWindowZstd(ReadableStream):
    """Decompresses zstd frames with windows of up to 2 GiB, as `zstd --long=31` makes them. The input chunks are small,
    because only their size limits the output of one call."""

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        self._raw, self._file = raw, file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ahead, self._ready = b"", memoryview(b"")

    def read_some(self, size: int) -> memoryview:
        try:
            while not self._ready and (packed := self._ahead or self._raw.read(_ZSTD_INPUT_BYTES)):
                wide = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
                self._frame = self._frame or wide.decompressobj()
                self._ready, self._ahead = memoryview(self._frame.decompress(packed)), self._frame.unused_data
                self._frame = None if self._frame.eof else self._frame
        except zstandard.ZstdError as error:
            raise _damaged_file_error(self._file, str(error)) from error
        if not self._ready and self._frame is not None:
            raise _damaged_file_error(self._file, "it ends too early")
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken


_DECOMPRESSORS: dict[Compression, Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]] = {
    "bz2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES),
}


class _ConcatenatedStreams(ReadableStream):
    """A stream of bz2 or xz data: one compressed stream after another, as in Wikipedia's multistream dumps.

    xz allows zero bytes between streams. Other bytes between streams, or a truncated stream, are errors.
    """

    def __init__(self, raw: BinaryIO, file: InputFile) -> None:
        self._raw, self._file = raw, file
        self._padding = b"\0" if file.compression == "xz" else b""
        self._plain = _DECOMPRESSORS[file.compression]()

    def read_some(self, size: int) -> bytes:
        try:
            return self._read_decompressed(size)
        except (OSError, EOFError, lzma.LZMAError) as error:
            if "emory usage limit" in str(error):
                raise InputError(
                    f"{self._file.uri} needs more than {_XZ_MEMORY_BYTES // MIB} MiB to be decompressed",
                    remedy="compress it again with a smaller dictionary: xz -9 or lower",
                ) from error
            raise _damaged_file_error(self._file, str(error)) from error

    def _read_decompressed(self, size: int) -> bytes:
        """Return up to `size` decompressed bytes; no bytes at the end of the file."""
        while True:
            packed = b""
            if self._plain.eof:
                if not (packed := self._read_past_padding()):
                    return b""
                self._plain = _DECOMPRESSORS[self._file.compression]()
            elif self._plain.needs_input and not (packed := self._raw.read(_BUFFER_BYTES)):
                raise EOFError("it ends too early")
            if data := self._plain.decompress(packed, size):
                return data

    def _read_past_padding(self) -> bytes:
        """Return the first bytes after a finished stream and its padding; no bytes at the end of the file."""
        ahead = self._plain.unused_data
        while not (rest := ahead.lstrip(self._padding)) and (ahead := self._raw.read(_BUFFER_BYTES)):
            pass
        return rest


def _damaged_file_error(file: InputFile, reason: str) -> InputError:
    return InputError(
        f"{file.uri}: damaged or truncated {file.compression} data: {reason}",
        remedy="fetch or compress the file again; no document of it was used",
    )
