"""Plain text: a file is a document, or blank lines separate the documents of a file."""

from collections.abc import Iterator

from data_service.ingest.compressed import open_piece, open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.lines import Line, LinePlace, read_lines
from data_service.ingest.options import BuildOptions
from data_service.ingest.ranged import line_start
from data_service.ingest.splits import Piece
from data_service.ingest.text import Text, decode, too_long


def read_txt(piece: Piece, options: BuildOptions) -> Iterator[Text]:
    """The documents of a piece of a .txt file. Raises InputError: not UTF-8, or a document too long."""
    if options.txt_documents == "blank_line":
        yield from _read_separated(piece, options)
    else:
        yield _read_whole(piece.file, options)


def _read_whole(file: InputFile, options: BuildOptions) -> Text:
    with open_text(file) as stream:
        data = stream.read(options.max_document_bytes + 1)
    if len(data) > options.max_document_bytes:
        raise too_long(file.uri, options.max_document_bytes)
    return decode(data, options, file, 0)


def _read_separated(piece: Piece, options: BuildOptions) -> Iterator[Text]:
    """Documents whose first line begins inside the piece, each to its end, which may lie behind the piece."""
    file, limit = piece.file, options.max_document_bytes
    start = piece.start
    if start and piece.text is None:
        # Begin with the line before the piece: whether a line begins a document is known from the line above it.
        start = line_start(file, start - 1)
    with open_piece(piece, start) as stream:
        for first, data in _separate(file, read_lines(file, stream, start, limit), limit):
            if first >= piece.stop and not file.compression:
                return
            if first >= piece.start:
                yield decode(data, options, file, first)


def _separate(file: InputFile, lines: Iterator[Line], limit: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each run of lines that are not blank."""
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
        run.append(line.data)
        size += len(line.data)
        if size > limit:
            raise too_long(LinePlace(file, first), limit)
    if run:
        yield first, b"".join(run)
