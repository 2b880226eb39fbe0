"""Reads big packed files (compressed, tar, or in another encoding than UTF-8): one reader goes through a file and
delivers its text in pieces of whole documents.

Such a file can only be decompressed and decoded from its beginning. So the size of its text in UTF-8 is measured
first. Its pieces are then ranges of these bytes, like those of a plain file, and each has its own tasks and receipts.
After an interruption, finished pieces are only decompressed and decoded, at hundreds of MB/s; tokenising does a few
MB/s per core.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO, ClassVar

from data_service.errors import InputError
from data_service.ingest.file_kinds import Format
from data_service.ingest.files import open_decompressed, open_text
from data_service.ingest.formats import LINE_TO_DOCUMENT_RATIO, skip_line
from data_service.ingest.inputs import InputFile
from data_service.ingest.mediawiki import PAGE_END, check_dump_end
from data_service.ingest.options import MIB, BuildOptions
from data_service.ingest.tars import BLOCK_BYTES, max_member_bytes, read_header, truncated_archive_error
from data_service.ingest.tasks import BuildTask, FilePiece, TaskReceipt
from data_service.store.base import Store

_TAIL_BYTES = BLOCK_BYTES  # bytes at the end of a file that are checked
_SEPARATOR_TESTS: dict[Format, Callable[[bytes], bool]] = {  # whether a line separates documents
    "txt": bytes.isspace,
    "mediawiki": lambda line: line.rstrip().endswith(PAGE_END),
}


@dataclass(frozen=True)
class MeasureTask(BuildTask):
    """The task of measuring the text of streamed file `index`."""

    file: InputFile

    stage: ClassVar[str] = "measure"

    @property
    def input_bytes(self) -> int:
        return self.file.size


class MeasuredFile(TaskReceipt):
    """The size of a streamed file's text. `plain_size`: bytes of its text, decompressed, in UTF-8."""

    plain_size: int


def measure_file(task: MeasureTask, store: Store) -> MeasuredFile:
    """Read the file once; return the size of its text.

    Raises:
        InputError: the data is damaged or truncated.
        StoreError: the file cannot be read.
    """
    with _open_streamed_file(task.file) as stream:
        size, tail = _size_and_tail(stream)
    if task.file.format == "mediawiki":
        check_dump_end(task.file, tail)
    if task.file.format == "tar" and (len(tail) < BLOCK_BYTES or tail.strip(b"\0")):
        raise truncated_archive_error(task.file)
    return MeasuredFile(source=task.source, plain_size=size)


class PieceReader:
    """Delivers the text of streamed pieces, one file after another.

    A document may begin at a tar member, or after a newline: in .txt after a blank line, in a dump after the end of a
    page. A piece's text begins at the first such position at or after its `start`, and ends at the first one at or
    after its `stop`. So the text depends only on the piece. Reading the pieces in order takes one pass over the file.
    """

    def __init__(self) -> None:
        self._file: InputFile | None = None
        self._stream: BinaryIO = io.BytesIO()
        self._position = 0
        self._sought = 0  # no document begins between here and `_separator`
        self._separator = 0  # start of the separator that ends at `_position`

    def read(self, piece: FilePiece, options: BuildOptions) -> FilePiece:
        """Return the piece with its text.

        A document that is too long is truncated, but stays longer than the limit, so that it is refused later.

        Raises:
            InputError: the data is damaged, or its length has changed since it was measured.
            StoreError: the file cannot be read.
        """
        if piece.file != self._file or piece.start < self._sought:
            self._open_file(piece.file)
        self._read_to_boundary(piece.start, options, None)
        start, text = self._position, list[bytes]()
        self._read_to_boundary(piece.stop, options, text)
        self._check_length_unchanged(piece)
        return replace(piece, text_start=start, text=b"".join(text))

    def _open_file(self, file: InputFile) -> None:
        self._stream.close()
        self._file, self._stream = file, _open_streamed_file(file)
        self._position = self._sought = self._separator = 0

    def _read_to_boundary(self, bound: int, options: BuildOptions, kept: list[bytes] | None) -> None:
        """Read up to the first position at or after `bound` where a document may begin. Append the text to `kept`."""
        self._sought = bound
        if self._file is not None and self._file.format == "tar":
            self._read_to_member(self._file, bound, max_member_bytes(options), kept)
            return
        if bound <= self._separator:
            return
        self._consume_bytes(bound - 1 - self._position, kept)
        limit = options.max_document_bytes * LINE_TO_DOCUMENT_RATIO
        if self._position < bound:
            self._consume_line(limit, kept)
        self._separator = self._position
        if self._file is not None and self._file.format in _SEPARATOR_TESTS:
            self._consume_document_lines(limit, kept, _SEPARATOR_TESTS[self._file.format])

    def _read_to_member(self, file: InputFile, bound: int, most: int, kept: list[bytes] | None) -> None:
        """Read tar members up to the first whose header, or the empty blocks before it, begin at or after `bound`. The
        content of members of more than `most` bytes is not kept."""
        while self._position < bound:
            skipped, member = read_header(self._stream, file, self._position)
            self._position += skipped
            if member is None:
                return
            if kept is not None:
                kept += [bytes(skipped), member.raw]
            self._position += len(member.raw)
            begins = self._position
            self._consume_bytes(member.padded_size, kept if member.size <= most else None)
            if self._position != begins + member.padded_size:
                raise truncated_archive_error(file)

    def _consume_document_lines(self, limit: int, kept: list[bytes] | None, separates: Callable[[bytes], bool]) -> None:
        """Read lines up to and including the next separator: the rest of one document, or only the separator."""
        taken = 0
        while line := self._consume_line(limit, kept if taken <= limit else None):
            if separates(line):
                return
            taken += len(line)
            self._separator = self._position

    def _consume_line(self, limit: int, kept: list[bytes] | None) -> bytes:
        """Read the rest of a line; return at most `limit` + 1 bytes of it."""
        line = self._stream.readline(limit + 1)
        self._position += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            self._position += skip_line(self._stream)
        if kept is not None:
            kept.append(line)
        return line

    def _consume_bytes(self, length: int, kept: list[bytes] | None) -> None:
        if kept is None:
            self._position += _skip_bytes(self._stream, length)
        elif length > 0:
            kept.append(self._stream.read(length))
            self._position += len(kept[-1])

    def _check_length_unchanged(self, piece: FilePiece) -> None:
        last = piece.stop == piece.plain_size
        if self._position < piece.stop or (last and (self._position > piece.stop or self._stream.read(1))):
            raise InputError(
                f"{piece.file.uri} changed while the corpus was built: it had {piece.plain_size:,} bytes of text",
                remedy="run the same command again when the inputs no longer change: it reads the changed files again",
            )


def _open_streamed_file(file: InputFile) -> BinaryIO:
    return open_decompressed(file) if file.format == "tar" else open_text(file)


def _size_and_tail(stream: BinaryIO) -> tuple[int, bytes]:
    """Read a stream to its end; return the number of bytes, and the last `_TAIL_BYTES` bytes."""
    size, tail = 0, b""
    while data := stream.read(MIB):
        size += len(data)
        tail = (tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
    return size, tail


def _skip_bytes(stream: BinaryIO, length: int) -> int:
    """Skip at most `length` bytes; return the number skipped."""
    passed = 0
    while passed < length and (data := stream.read(min(MIB, length - passed))):
        passed += len(data)
    return passed
