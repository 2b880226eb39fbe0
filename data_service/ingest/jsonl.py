"""JSON lines: one object a line, the document in one of its fields. Blank lines are skipped."""

import json
from collections.abc import Iterator

from data_service.errors import InputError
from data_service.ingest.compressed import open_piece
from data_service.ingest.lines import Line, LinePlace, read_lines, skip_line
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece
from data_service.ingest.text import Text, checked, decode

LINE_PER_DOCUMENT = (
    8  # a line may be this many times its document: escapes take six bytes, other fields the rest
)


def read_jsonl(piece: Piece, options: BuildOptions) -> Iterator[Text]:
    """The documents of the lines that begin inside the piece.

    Raises:
        InputError: a line that is not UTF-8 or not a JSON object, a field that is missing or not text,
            a document too long.
    """
    file, limit = piece.file, options.max_document_bytes * LINE_PER_DOCUMENT
    start = piece.start
    if start and piece.text is None:
        start -= 1  # the byte before the piece tells whether a line begins with the piece
    with open_piece(piece, start) as stream:
        if start < piece.start:
            start += skip_line(stream)
        for line in read_lines(file, stream, start, limit):
            if line.offset >= piece.stop and not file.compression:
                return
            if not line.data.isspace():
                yield _parse(line, LinePlace(file, line.offset), options)


def _parse(line: Line, place: LinePlace, options: BuildOptions) -> Text:
    raw = decode(line.data, options, place.file, line.offset)
    try:
        record = json.loads(raw.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place}: not JSON: {error}", remedy="correct the line or remove it") from error
    if not isinstance(record, dict) or options.text_field not in record:
        fields = (
            f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else "it is not an object"
        )
        raise InputError(
            f"{place}: no field {options.text_field!r} ({fields})",
            remedy="name the field that holds the text with --text-field",
        )
    text = record[options.text_field]
    if not isinstance(text, str):
        raise InputError(
            f"{place}: field {options.text_field!r} is {type(text).__name__}, not text",
            remedy="name the field that holds the text with --text-field, or remove the line",
        )
    document = checked(text, options, place)
    return Text(document.text, document.replaced or raw.replaced)
