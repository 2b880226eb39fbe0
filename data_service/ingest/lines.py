"""Lines of a byte stream with their offsets, each of bounded length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_service.ingest.compressed import open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.text import too_long

_SKIP = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line's bytes, its newline included, and the offset of the first in the (decompressed) file."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line is, for messages. The line's number is only counted when somebody asks."""

    file: InputFile
    offset: int

    def __str__(self) -> str:
        newlines, left = 0, self.offset
        with open_text(self.file) as stream:
            while left > 0 and (data := stream.read(min(_SKIP, left))):
                newlines += data.count(b"\n")
                left -= len(data)
        return f"{self.file.uri}, line {newlines + 1}"


def read_lines(file: InputFile, stream: BinaryIO, offset: int, limit: int) -> Iterator[Line]:
    """All lines from the stream's position on, which is byte `offset` of the file.

    Raises:
        InputError: a line of more than `limit` bytes.
    """
    while data := stream.readline(limit + 1):
        if len(data) > limit:
            raise too_long(LinePlace(file, offset), limit)
        yield Line(offset, data)
        offset += len(data)


def skip_line(stream: BinaryIO) -> int:
    """Read to the end of the current line, whatever its length; the number of bytes skipped."""
    skipped = 0
    while data := stream.readline(_SKIP):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
