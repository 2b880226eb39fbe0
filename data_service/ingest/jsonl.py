"""JSON lines: one object a line, the document in one of its fields. Blank lines are skipped."""

import json
from collections.abc import Iterator
from dataclasses import replace

from data_service.ingest.compressed import open_piece
from data_service.ingest.examples import example
from data_service.ingest.lines import Line, LinePlace, read_lines, skip_line
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece
from data_service.ingest.text import BadRecord, Text, accept, checked, decode, too_long, without_mark

# A line may be this many times its document: escapes take six bytes, other fields the rest.
LINE_PER_DOCUMENT = 8


def read_jsonl(piece: Piece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    """The documents of the lines that begin inside the piece.

    A record is bad if its line is not UTF-8, not a JSON object, without the field, or if that is not text; and if the
    document is too long.
    """
    file, limit = piece.file, options.max_document_bytes * LINE_PER_DOCUMENT
    start = piece.text_start
    if piece.text is None:
        # The byte before the piece tells whether a line begins with the piece.
        start = max(0, piece.start - 1)
    with open_piece(piece, start) as stream:
        if start < piece.start:
            start += skip_line(stream)
        for line in read_lines(stream, start, limit):
            if line.offset >= piece.stop and not file.compression:
                return
            if not line.data.isspace():
                yield accept(options, _parse, line, LinePlace(file, line.offset), options)


def _parse(line: Line, place: LinePlace, options: BuildOptions) -> Text:
    if len(line.data) > options.max_document_bytes * LINE_PER_DOCUMENT:
        raise too_long(place, options.max_document_bytes * LINE_PER_DOCUMENT)
    data, offset = without_mark(line.data, line.offset)
    raw = decode(data, options, place, offset)
    try:
        record = _loads(raw.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadRecord(place, f"not JSON: {error}", _one_a_line(raw.text)) from error
    if isinstance(record, dict) and options.pairs is not None:
        found = example(record, options.pairs, options, place)
        return replace(found, replaced=found.replaced or raw.replaced)
    if not isinstance(record, dict) or options.text_field not in record:
        fields = (
            f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else "it is not an object"
        )
        reason = f"no field {options.fields[0]!r} ({fields})"
        raise BadRecord(place, reason, "name the field that holds the text with --text-field")
    text = record[options.text_field]
    if not isinstance(text, str):
        reason = f"field {options.text_field!r} is {type(text).__name__}, not text"
        raise BadRecord(
            place, reason, "name the field that holds the text with --text-field, or remove the line"
        )
    document = checked(text, options, place)
    return Text(document.text, document.replaced or raw.replaced)


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python converts: no concern of the text beside it
        return json.loads(text, parse_int=lambda digits: 0)


def _one_a_line(text: str) -> str:
    if text.strip() in ("{", "["):  # the first line of a file that is one value
        return "make it JSON lines, one object a line, for example with `jq -c`"
    return "correct the line or remove it"
