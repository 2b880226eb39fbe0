"""Reads the documents of files that consist of lines: .txt, JSON lines, CSV and TSV. Lines have bounded length.

- .txt: the file is one document, or blank lines separate the documents.
- JSON lines: one object per line, with the document in one field, or one string per line. Blank lines are skipped.
- CSV and TSV: a first line with the names of the columns, then one document per row, in one column. As in RFC 4180 and
  spreadsheets, a field that begins with a quotation mark ends with one, may hold line ends, and doubles the marks
  inside. A row can only be found from the beginning of such a file, so one task reads the whole file.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from data_service.errors import InputError
from data_service.ingest.encodings import strip_bom
from data_service.ingest.files import line_start, open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.json_values import parse_json_value
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import LinePlace, RecordPlace
from data_service.ingest.records import (
    BadRecord,
    TextRecord,
    decode_text,
    flatten_named_fields,
    guess_encoding_remedy,
    parse_record,
    skip_or_refuse,
    too_long_record,
    try_read,
    with_provenance,
)
from data_service.ingest.tasks import FilePiece

_SKIP_BYTES = 1 << 20  # bytes of one read when a line is skipped
_LINE_SEARCH_BYTES = 64 * 1024  # bytes before a piece in which the start of a line is searched first
# Largest ratio of a line's bytes to its document's: a JSON escape takes six bytes, the rest is for other fields.
LINE_TO_DOCUMENT_RATIO = 8
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_OTHER_DELIMITERS = ";\t,|"  # delimiters tried if the usual one does not give the columns
_QUOTES_REMEDY = "quote fields as RFC 4180 says (pandas' to_csv does), or convert the file to JSON lines"
_INVALID_CSV_LINE = '"a line too long"to be held\n'  # replaces a line that is too long: invalid CSV anywhere in a row


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line's bytes, its newline included, and the offset of its first byte in the (decompressed) file.

    A line that is too long is cut one byte after the limit.
    """

    offset: int
    data: bytes


def read_lines(stream: BinaryIO, offset: int, max_bytes: int) -> Iterator[InputLine]:
    """Yield all lines from the stream's position on, at most `max_bytes` + 1 bytes of each.

    `offset`: the stream's position, as an offset in the file.
    """
    while data := stream.readline(max_bytes + 1):
        yield InputLine(offset, data)
        offset += len(data)
        if not data.endswith(b"\n"):
            offset += skip_line(stream)


def _skip_bounded_line(stream: BinaryIO, max_bytes: int) -> int:
    """Skip the rest of the current line; return the number of bytes, or 0 without a line end within `max_bytes` bytes.

    At most `max_bytes` bytes are read, so a piece inside a long line costs no more than any other.
    """
    length = 0
    while length < max_bytes and (data := stream.readline(min(_SKIP_BYTES, max_bytes - length))):
        length += len(data)
        if data.endswith(b"\n"):
            return length
    return 0


def skip_line(stream: BinaryIO) -> int:
    """Read to the end of the current line without storing it; return the number of bytes skipped."""
    skipped = 0
    while data := stream.readline(_SKIP_BYTES):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped


def _open_piece(piece: FilePiece, start: int) -> BinaryIO:
    """Return a stream of a piece's text: `piece.text` if a `PieceReader` has delivered it, else the file's text from
    byte `start` on.

    Raises:
        InputError: as in `open_text`.
    """
    if piece.text is not None:
        return io.BytesIO(piece.text)
    assert not piece.plain_size, "a streamed piece is read by PieceReader"
    return open_text(piece.file, start=start, expected_bytes=piece.stop - start)


def read_txt(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a piece of a .txt file. A document is bad if it is not UTF-8 or too long."""
    if options.txt_documents == "blank_line":
        yield from _read_blank_line_separated(piece, options)
    else:
        with open_text(piece.file) as stream:
            data = stream.read(options.max_document_bytes + 1)
        yield try_read(options, parse_txt_document, data, 0, RecordPlace(piece.file), options)


def _read_blank_line_separated(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents whose first line begins inside the piece. They may end after the piece."""
    file, limit, cut = piece.file, options.max_document_bytes, piece.text is None and piece.start > 0
    start = _previous_line_start(piece) if cut else piece.text_start
    if start is None:
        return
    with _open_piece(piece, start) as stream:
        lines = read_lines(stream, start, limit)
        if cut and not next(lines).data.isspace() and not _skip_earlier_document(lines, piece.stop):
            return
        for first, data in split_at_blank_lines(lines, limit):
            if not piece.contains_document_at(first):
                return
            yield try_read(options, parse_txt_document, data, first, LinePlace(file, "byte", first), options)


def _previous_line_start(piece: FilePiece) -> int | None:
    """Return the offset of the line before the first line that begins inside the piece; None if no line begins there.

    The line above tells whether a line begins a document. Only the piece with the end of a long line searches for the
    line's start, so that a line across many pieces is read only a few times.
    """
    near = line_start(piece.file, piece.start - 1, within=_LINE_SEARCH_BYTES)
    if near is not None:
        return near
    with _open_piece(piece, piece.start - 1) as stream:
        if not _skip_bounded_line(stream, piece.stop - piece.start):
            return None
    return line_start(piece.file, piece.start - 1)


def _skip_earlier_document(lines: Iterator[InputLine], stop: int) -> bool:
    """Skip a document that began before the piece; return whether it ends before byte `stop`, where reading stops."""
    for line in lines:
        if line.offset >= stop:
            return False
        if line.data.isspace():
            return True
    return False


def parse_txt_document(data: bytes, offset: int, place: RecordPlace, options: BuildOptions) -> TextRecord:
    """Return the document whose text is `data`, which begins at byte `offset` of the file.

    Raises:
        BadRecord: it is not UTF-8 or too long.
    """
    if len(data) > options.max_document_bytes:
        raise too_long_record(place, options.max_document_bytes)
    data, offset = strip_bom(data, offset)
    found = decode_text(data, options, place, offset)
    found = found if options.metadata_fields is None else replace(found, place=place)
    return with_provenance(found, {}, options, place)


def split_at_blank_lines(lines: Iterator[InputLine], limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of each run of lines that are not blank. Runs are truncated soon after `limit` bytes."""
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


def read_jsonl(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of the lines that begin inside the piece.

    A record is bad if its line is not UTF-8, is neither a JSON object nor a string, or lacks the field with the text,
    if that field is not text, or if the document is too long.
    """
    for line in read_piece_lines(piece, options.max_document_bytes * LINE_TO_DOCUMENT_RATIO):
        if not piece.contains_document_at(line.offset):
            return
        if not line.data.isspace():
            yield try_read(options, parse_json_line, line, LinePlace(piece.file, "byte", line.offset), options)


def read_piece_lines(piece: FilePiece, max_bytes: int) -> Iterator[InputLine]:
    """Yield the lines from the first that begins inside the piece to the end of the file, at most `max_bytes` + 1 bytes
    of each; no lines if none begins in the piece."""
    # The byte before the piece tells whether a line begins at the piece's start.
    start = max(0, piece.start - 1) if piece.text is None else piece.text_start
    with _open_piece(piece, start) as stream:
        if start < piece.start:
            above = _skip_bounded_line(stream, piece.stop - piece.start)
            if not above:
                return
            start += above
        yield from read_lines(stream, start, max_bytes)


def parse_json_line(line: InputLine, place: RecordPlace, options: BuildOptions) -> TextRecord:
    """Return the document of a line: a JSON object with a field of text, or a JSON string that is the text.

    Raises:
        BadRecord: see `read_jsonl`.
    """
    if len(line.data) > options.max_document_bytes * LINE_TO_DOCUMENT_RATIO:
        raise too_long_record(place, options.max_document_bytes * LINE_TO_DOCUMENT_RATIO)
    data, offset = strip_bom(line.data, line.offset)
    raw = decode_text(data, options, place, offset)
    try:
        record = parse_json_value(raw.text)
    except (json.JSONDecodeError, RecursionError) as error:
        remedy = _invalid_json_remedy(raw.text)
        if "\0" in raw.text and options.on_bad_records == "error":
            remedy = guess_encoding_remedy(place.file, data, remedy)
        raise BadRecord(place, f"not JSON: {error}", remedy) from error
    if isinstance(record, str) and options.pairs is None:
        record = {options.text_field: record}
    record = flatten_named_fields(record, options) if isinstance(record, dict) else record
    if not isinstance(record, dict) or (options.pairs is None and options.text_field not in record):
        fields = f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else "it is not an object"
        reason = f"no field {options.required_fields[0]!r} ({fields})"
        raise BadRecord(place, reason, "name the field that holds the text with --text-field")
    text = record.get(options.text_field)
    if options.pairs is None and not isinstance(text, str):
        reason = f"field {options.text_field!r} is {type(text).__name__}, not text"
        raise BadRecord(place, reason, "name the field that holds the text with --text-field, or remove the line")
    found = parse_record(record, options, place)
    return replace(found, replaced=found.replaced or raw.replaced)


def _invalid_json_remedy(text: str) -> str:
    if text.strip() in ("{", "["):  # the first line of a file that holds one JSON value
        return "make it JSON lines, one object a line, for example with `jq -c`"
    return "correct the line or remove it"


def read_delimited(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a whole file.

    A record is bad if it has another number of fields than the first line, breaks the rules of quotation, or holds text
    that is not UTF-8 or a document too long.

    The delimiter is the one in the options; else the usual one; else, if the usual one does not give the requested
    columns, the first other one that does.

    Raises:
        InputError: the first line lacks a required column, or has it twice.
    """
    file = piece.file
    # The limit holds for the whole process, which reads no other CSV.
    csv.field_size_limit(options.max_document_bytes * LINE_TO_DOCUMENT_RATIO)
    rows, names = _open_rows(file, options)
    there = [name for name in options.optional_fields if name in names]
    columns = {name: _column_index(name, names, file) for name in (*options.required_fields, *there)}
    while True:
        place = RecordPlace(file, "line", rows.line_num + 1)
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield skip_or_refuse(options, BadRecord(place, f"not {file.format.upper()}: {error}", _QUOTES_REMEDY))
            continue
        if row:  # a blank line does not count as a row
            yield try_read(options, _parse_row, row, len(names), columns, place, options)


def possible_delimiters(kind: str, configured: str | None) -> tuple[str, ...]:
    """Return the possible delimiters of a table of `kind` (csv, tsv), in the order in which they are tried."""
    return (configured,) if configured else tuple(dict.fromkeys(_DELIMITERS[kind] + _OTHER_DELIMITERS))


def _open_rows(file: InputFile, options: BuildOptions) -> tuple[Any, list[str]]:
    """Return the rows after the first, and the names of the columns.

    If no delimiter gives the requested columns, the one that gives the most columns is used.
    """
    best: tuple[Any, list[str]] | None = None
    problems: list[csv.Error] = []
    for delimiter in possible_delimiters(file.format, options.delimiter):
        rows = csv.reader(_decoded_lines(file, options), delimiter=delimiter, strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
        except csv.Error as error:  # the first line's quotes are invalid with this delimiter
            problems.append(error)
            continue
        if all(names.count(name) == 1 for name in options.required_fields):
            return rows, names
        if best is None or len(names) > len(best[1]):
            best = rows, names
    if best is None:
        raise InputError(
            f"{file.uri}, line 1: not {file.format.upper()}: {problems[0]}", remedy=_QUOTES_REMEDY
        ) from problems[0]
    return best


def _column_index(wanted: str, names: list[str], file: InputFile) -> int:
    if names.count(wanted) == 1:
        return names.index(wanted)
    first = ", ".join(name[:40] for name in names[:20]).encode(errors="surrogateescape")
    remedy = (
        "name the column that holds the text with --text-field (of pairs: --query-field, --positive-field, "
        "--negatives-field); the first line must name the columns; set --delimiter if another character separates "
        "columns, and --encoding if the file is not UTF-8"
    )
    shown = first.decode(errors="replace")
    raise InputError(
        f"{file.uri}: {'two columns' if wanted in names else 'no column'} {wanted!r} "
        f"in its first line (it has {shown})",
        remedy=guess_encoding_remedy(file, first, remedy) if "\ufffd" in shown else remedy,
    )


def _decoded_lines(file: InputFile, options: BuildOptions) -> Iterator[str]:
    """Yield the file's lines with their line ends.

    Bytes that are not UTF-8 become lone surrogates, so that rows can be split before their text is checked.
    """
    limit = options.max_document_bytes * LINE_TO_DOCUMENT_RATIO
    with open_text(file) as stream:
        for line in read_lines(stream, 0, limit):
            data, _ = strip_bom(line.data, line.offset)
            yield data.decode(errors="surrogateescape") if len(data) <= limit else _INVALID_CSV_LINE


def _parse_row(
    row: list[str], width: int, columns: Mapping[str, int], place: RecordPlace, options: BuildOptions
) -> TextRecord:
    if len(row) != width:
        raise BadRecord(place, f"{len(row)} fields, but the first line has {width}", _QUOTES_REMEDY)
    values = {name: row[column].encode(errors="surrogateescape") for name, column in columns.items()}
    return parse_record(values, options, place)
