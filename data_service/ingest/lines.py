"""Lines of a byte stream with their offsets, each of bounded length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_service.ingest.compressed import open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.text import Unit

_SKIP = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line's bytes, its newline included, and the offset of the first in the (decompressed) file.

    Of a line that is too long there is one byte more than is allowed.
    """

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line is, for messages. The line's number is only counted when somebody asks."""

    file: InputFile
    offset: int

    @property
    def unit(self) -> Unit:
        return "byte"

    @property
    def number(self) -> int:
        return self.offset

    def __str__(self) -> str:
        newlines, left = 0, self.offset
        with open_text(self.file) as stream:
            while left > 0 and (data := stream.read(min(_SKIP, left))):
                newlines += data.count(b"\n")
                left -= len(data)
        return f"{self.file.uri}, line {newlines + 1}"


def read_lines(stream: BinaryIO, offset: int, limit: int) -> Iterator[Line]:
    """All lines from the stream's position on, byte `offset` of the file; at most `limit` + 1 bytes of each."""
    while data := stream.readline(limit + 1):
        yield Line(offset, data)
        offset += len(data)
        if not data.endswith(b"\n"):
            offset += skip_line(stream)


def skip_line(stream: BinaryIO) -> int:
    """Read to the end of the current line, whatever its length; the number of bytes skipped."""
    skipped = 0
    while data := stream.readline(_SKIP):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
