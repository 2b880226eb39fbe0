"""CSV and TSV: a first line with the names of the columns, then one document a row, in one of them.

As RFC 4180 and spreadsheets have it: a field that begins with a quotation mark ends with one, may hold line ends, and
doubles the marks inside. So only the beginning of a file is surely the beginning of a row, and a file is one piece.
"""

import csv
from collections.abc import Iterator, Mapping

from data_service.errors import InputError
from data_service.ingest.compressed import open_text
from data_service.ingest.examples import example
from data_service.ingest.inputs import InputFile
from data_service.ingest.lines import read_lines
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece
from data_service.ingest.text import BadRecord, Numbered, Text, accept, checked, decode, without_mark

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_QUOTES = "quote fields as RFC 4180 says (pandas' to_csv does), or convert the file to JSON lines"
_TOO_LONG = '"a line too long"to be held\n'  # breaks the rules wherever it stands, so that its row is bad
_ROW_PER_DOCUMENT = 8  # a line may be this many times its document: other fields, doubled marks


def read_delimited(piece: Piece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    """The documents of a whole file.

    A record is bad if it has another number of fields than the first line, breaks the rules of quotation, or holds text
    that is not UTF-8 or a document too long.

    Raises:
        InputError: a first line without the column.
    """
    file = piece.file
    csv.field_size_limit(
        options.max_document_bytes * _ROW_PER_DOCUMENT
    )  # of the whole process, which reads no other
    rows = csv.reader(_lines(file, options), delimiter=_DELIMITERS[file.format], strict=True)
    names = _names(rows, file)
    columns = {name: _column(name, names, file) for name in options.fields}
    while True:
        place = Numbered(file, "line", rows.line_num + 1)
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield accept(options, _refuse, BadRecord(place, f"not {file.format.upper()}: {error}", _QUOTES))
            continue
        if row:  # a blank line is no row
            yield accept(options, _parse, row, len(names), columns, place, options)


def _names(rows: Iterator[list[str]], file: InputFile) -> list[str]:
    try:
        return [name.strip() for name in next(rows, [])]
    except csv.Error as error:
        raise InputError(f"{file.uri}, line 1: not {file.format.upper()}: {error}", remedy=_QUOTES) from error


def _column(wanted: str, names: list[str], file: InputFile) -> int:
    if names.count(wanted) == 1:
        return names.index(wanted)
    shown = ", ".join(name[:40].encode(errors="replace").decode() for name in names[:20])
    raise InputError(
        f"{file.uri}: {'two columns' if wanted in names else 'no column'} {wanted!r} "
        f"in its first line (it has {shown})",
        remedy="name the column that holds the text with --text-field (of pairs: --query-field, --positive-field, "
        "--negatives-field); the first line must name the columns",
    )


def _lines(file: InputFile, options: BuildOptions) -> Iterator[str]:
    """Lines with their ends; bytes that are not UTF-8 become half surrogates, so that rows can be told apart first."""
    limit = options.max_document_bytes * _ROW_PER_DOCUMENT
    with open_text(file) as stream:
        for line in read_lines(stream, 0, limit):
            data, _ = without_mark(line.data, line.offset)
            yield data.decode(errors="surrogateescape") if len(data) <= limit else _TOO_LONG


def _parse(
    row: list[str], width: int, columns: Mapping[str, int], place: Numbered, options: BuildOptions
) -> Text:
    if len(row) != width:
        raise BadRecord(place, f"{len(row)} fields, where the first line has {width}", _QUOTES)
    values = {name: row[column].encode(errors="surrogateescape") for name, column in columns.items()}
    if options.pairs is not None:
        return example(values, options.pairs, options, place)
    raw = decode(values[options.text_field], options, place)
    document = checked(raw.text, options, place)
    return Text(document.text, document.replaced or raw.replaced)


def _refuse(bad: BadRecord) -> Text:
    raise bad
