"""Plain text: a file is a document, or blank lines separate the documents of a file."""

from collections.abc import Iterator

from data_service.ingest.compressed import open_piece, open_text
from data_service.ingest.lines import Line, LinePlace, read_lines
from data_service.ingest.options import BuildOptions
from data_service.ingest.ranged import line_start
from data_service.ingest.splits import Piece
from data_service.ingest.text import (
    BadRecord,
    Numbered,
    Place,
    Text,
    accept,
    decode,
    too_long,
    without_mark,
)


def read_txt(piece: Piece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    """The documents of a piece of a .txt file. One is bad if it is not UTF-8 or too long."""
    if options.txt_documents == "blank_line":
        yield from _read_separated(piece, options)
    else:
        with open_text(piece.file) as stream:
            data = stream.read(options.max_document_bytes + 1)
        yield accept(options, _parse, data, 0, Numbered(piece.file), options)


def _read_separated(piece: Piece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    """Documents whose first line begins inside the piece, each to its end, which may lie behind the piece."""
    file, limit = piece.file, options.max_document_bytes
    start = piece.text_start
    if piece.text is None and piece.start:
        # Begin with the line before the piece: whether a line begins a document is known from the line above it.
        start = line_start(file, piece.start - 1)
    with open_piece(piece, start) as stream:
        for first, data in _separate(read_lines(stream, start, limit), limit):
            if first >= piece.stop and not file.compression:
                return
            if first >= piece.start:
                yield accept(options, _parse, data, first, LinePlace(file, first), options)


def _parse(data: bytes, offset: int, place: Place, options: BuildOptions) -> Text:
    if len(data) > options.max_document_bytes:
        raise too_long(place, options.max_document_bytes)
    data, offset = without_mark(data, offset)
    return decode(data, options, place, offset)


def _separate(lines: Iterator[Line], limit: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each run of lines that are not blank; of one too long a little more than `limit` bytes."""
    run: list[bytes] = []
    first = size = 0
    for line in lines:
        if line.data.isspace():
            if run:
                yield first, b"".join(run)
            run, size = [], 0
            continue
        if not run:
            first = line.offset
        if size <= limit:
            run.append(line.data)
            size += len(line.data)
    if run:
        yield first, b"".join(run)
