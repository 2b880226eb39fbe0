"""Finds a task's files in a folder or below an s3:// URI; decompresses and decodes them, and reads them as rows."""

import csv
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_service.ingest.file_kinds import Compression, kind_from_name
from data_service.ingest.files import open_stored_bytes, open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import guess_encoding_remedy
from data_service.store.open import open_store_of_file
from launcher.after.tasks.schema import TaskDescription, TaskFormat
from launcher.errors import TaskError

_BYTE_ORDER_MARK = "\ufeff"
_CODECS: dict[str, Compression] = {"": "", ".gz": "gz", ".zst": "zst"}  # compression by the ending of a name
_MAX_FIELD_CHARACTERS = 1 << 30  # the csv module's default is 128 Ki characters
_READ_AHEAD_BYTES = 64 * 1024  # bytes that one read of a Parquet file takes
_BATCH_ROWS = 1024  # rows of a Parquet file that are in memory at a time
_FIELDS_REMEDY = "correct the file, or the task's `fields`"
_LOG = logging.getLogger("launcher.after.tasks")
FilePlace = str | RecordPlace
"""The place of a value in a file, for messages."""


@dataclass(frozen=True)
class TaskFolder:
    """The folder with a task's files.

    Attributes:
        root: folder or s3:// URI to which paths are relative.
        task: name of the task, for messages.
        published: place where the files are published, for messages.
    """

    root: str
    task: str
    published: str

    def find_file(self, path: str) -> InputFile:
        """Return the file at `path`, or at `path` with .gz or .zst after it. Raises TaskError if there is none."""
        whole = path if "://" in path else f"{self.root.rstrip('/')}/{path}"
        if "://" not in whole:
            whole = os.path.abspath(path if os.path.isabs(path) else os.path.expanduser(whole))
        store, name = open_store_of_file(whole)
        for ending, kind in _CODECS.items():
            if (entry := store.entry(name + ending)) is not None:
                packed = kind or next((_CODECS[end] for end in (".gz", ".zst") if name.endswith(end)), "")
                return InputFile(store.uri, entry.key, entry.size, "txt", packed, entry.version)
        raise TaskError(
            f"{whole} does not exist; the task {self.task} needs this file",
            remedy=f"get the file from {self.published}, and pass its folder with --data (Maskfleet downloads nothing)",
        )


@dataclass(frozen=True)
class RowFormat:
    """The format of a file of rows.

    Attributes:
        format: jsonl, tsv, csv, parquet, txt, label_first or trec.
        columns: names of fields that a table must have, or numbers of columns from 1.
        optional: names of further fields, which are read if a Parquet file has them.
        encoding: encoding of text.
        delimiter: character between columns; None for the usual one.
        quoted: whether cells may be in quotation marks.
        skip_broken: whether rows with a wrong number of cells are skipped and counted.
    """

    format: TaskFormat
    columns: tuple[str | int, ...]
    optional: tuple[str, ...] = ()
    encoding: str = "utf-8"
    delimiter: str | None = None
    quoted: bool = False
    skip_broken: bool = False

    @classmethod
    def from_task(cls, task: TaskDescription) -> "RowFormat":
        """Return the format that a task's YAML describes."""
        return cls(
            format=task.format,
            columns=tuple(task.fields.given_fields().values()),
            encoding=task.encoding,
            delimiter=task.delimiter,
            quoted=task.format == "csv" if task.quotes is None else task.quotes,
            skip_broken=task.broken_rows == "skip",
        )


def format_from_suffix(path: str) -> TaskFormat:
    """Return the format of a file by the ending of its name. Raises TaskError if the ending is unknown."""
    match kind_from_name(path):
        case ("jsonl" | "parquet" | "tsv" | "csv") as form, "" | "gz" | "zst":
            return form
    raise TaskError(
        f"{path} has an unknown ending",
        remedy="give .jsonl, .json, .parquet, .tsv or .csv, also with .gz or .zst",
    )


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row of a file: its place, and the values of its fields by name, or by the column's number as text."""

    place: RecordPlace
    values: Mapping[str, object]

    def error(self, problem: str, remedy: str = _FIELDS_REMEDY) -> TaskError:
        return TaskError(f"{self.place}: {problem}", remedy=remedy)

    def value(self, name: str) -> object:
        """Return the value of a field. Raises TaskError if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            found = ", ".join(str(key)[:40] for key in self.values)
            problem = "is null" if name in self.values else f"is missing (there are {found})"
            raise self.error(f"the field {name!r} {problem}")
        return value

    def text(self, name: str) -> str:
        """Return the text of a field; a list of texts is joined with spaces (CSL's keywords). Raises TaskError if the
        value is not text, or not valid Unicode."""
        value = self.value(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = " ".join(value)
        if not isinstance(value, str):
            raise self.error(f"the field {name!r} is {type(value).__name__}, not text")
        return check_valid_unicode(value, self.place)

    def label(self, name: str) -> str:
        """Return the label in a field as text. Raises TaskError if it is missing, or neither a text nor a number."""
        value = self.value(name)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str | int | float):
            return str(value)
        raise self.error(f"the label is {type(value).__name__}, not a text or a number")


def check_valid_unicode(text: str, place: FilePlace) -> str:
    """Return `text`. Raises TaskError if it holds half a surrogate pair, which JSON allows but no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{place}: character {error.start} is half a surrogate pair, which is not text",
            remedy="correct or remove the record",
        ) from error
    return text


def read_lines(file: InputFile, encoding: str) -> Iterator[str]:
    """Yield the lines of a file without line feeds. Other characters end no line, because texts may contain them.

    Raises TaskError if bytes are not in `encoding`, InputError if compressed data are damaged.
    """
    file = replace(file, encoding=encoding)
    with open_text(file) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                remedy = "convert the file to UTF-8, or set the task's `encoding`"
                raise TaskError(
                    f"{file.uri}, line {number}: byte {error.start} is not {file.encoding}",
                    remedy=guess_encoding_remedy(file, raw, remedy, "write `encoding: {}` into the task"),
                ) from error
            yield ((line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).removesuffix("\n").removesuffix("\r"))


def read_rows(row_format: RowFormat, file: InputFile) -> Iterator[FileRow]:
    """Yield the rows of a file, without blank lines.

    Raises TaskError if a row or line is broken, or a column is missing; InputError, StoreError if the file cannot be
    read.
    """
    match row_format.format:
        case "parquet":
            for number, values in enumerate(_parquet_rows(row_format, file)):
                yield FileRow(RecordPlace(file, "row", number), values)
        case "tsv" | "csv":
            yield from _table_rows(row_format, file)
        case form:
            for number, line in enumerate(read_lines(file, row_format.encoding), 1):
                if line.strip():
                    place = RecordPlace(file, "line", number)
                    yield FileRow(place, _parse_line(form, line, place))


def _parse_line(line_format: TaskFormat, line: str, place: FilePlace) -> Mapping[str, object]:
    if line_format == "txt":
        return {"first": line}
    if line_format == "jsonl":
        return parse_json_object(line, place)
    label, _, text = line.partition(" ")  # `3 a stirring film`, or TREC's `NUM:dist How far is it ...`
    coarse, colon, _ = label.partition(":")
    if not text.strip() or (line_format == "trec" and not colon):
        wanted = "LABEL:detail" if line_format == "trec" else "a label"
        raise TaskError(f"{place}: the line is not {wanted}, a space and a text", remedy="correct the line")
    return {"label": coarse if line_format == "trec" else label, "first": text.strip()}


def parse_json_object(text: str | bytes, place: FilePlace) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises TaskError if there is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{place}: not JSON: {error}", remedy="correct it; jsonl needs each object on one line, as jq -c writes it"
        ) from error
    if not isinstance(record, dict):
        raise TaskError(
            f"{place}: a JSON {type(record).__name__}, not an object", remedy="write one object on each line"
        )
    return record


def _table_rows(row_format: RowFormat, file: InputFile) -> Iterator[FileRow]:
    cells = _table_cells(row_format, file)
    numbered = any(isinstance(column, int) for column in row_format.columns)
    names = None if numbered else _column_names(next(cells, (0, []))[1], row_format, file)
    least = max((column for column in row_format.columns if isinstance(column, int)), default=0)
    broken = 0
    for number, row in cells:
        if (len(row) < least) if names is None else (len(row) != len(names)):
            if not row_format.skip_broken:
                wanted = f"column {least} is needed" if names is None else f"the first line names {len(names)}"
                raise TaskError(
                    f"{file.uri}, line {number}: {len(row)} fields, but {wanted}",
                    remedy="correct the file; or set the character between columns (`delimiter`) in the task, or leave "
                    "such rows out (`broken_rows: skip`)",
                )
            broken += 1
            continue
        keys = names or [str(column) for column in range(1, len(row) + 1)]
        yield FileRow(RecordPlace(file, "line", number), dict(zip(keys, row, strict=True)))
    if broken:
        _LOG.warning("%s: left out %d rows with a wrong number of fields", file.uri, broken)


def _table_cells(row_format: RowFormat, file: InputFile) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line of each row, and its cells."""
    delimiter = row_format.delimiter or ("\t" if row_format.format == "tsv" else ",")
    if not row_format.quoted:
        lines = enumerate(read_lines(file, row_format.encoding), 1)
        yield from ((number, line.split(delimiter)) for number, line in lines if line)
        return
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)  # this sets the limit for the whole process
    rows = csv.reader((f"{line}\n" for line in read_lines(file, row_format.encoding)), delimiter=delimiter, strict=True)
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise TaskError(
                f"{file.uri}, line {number}: not {row_format.format.upper()}: {error}",
                remedy="quote fields as RFC 4180 requires, or set `quotes: false` in the task",
            ) from error
        if row is None:
            return
        if row:
            yield number, row


def _column_names(first_row: Sequence[str], row_format: RowFormat, file: InputFile) -> list[str]:
    names = [name.strip() for name in first_row]
    for wanted in map(str, row_format.columns):
        if names.count(wanted) != 1:
            count = "two columns" if wanted in names else "no column"
            shown = ", ".join(name[:40] for name in names[:20])
            raise TaskError(
                f"{file.uri}: {count} {wanted!r} in its first line (it has {shown})",
                remedy="correct the task's `fields`; use numbers of columns if no line names the columns; set the "
                "character between columns with `delimiter`",
            )
    return names


def _parquet_rows(row_format: RowFormat, file: InputFile) -> Iterator[dict[str, object]]:
    import pyarrow as pa  # not at the top, so that a run's ranks do not load it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(open_stored_bytes(file, chunk_bytes=_READ_AHEAD_BYTES), pre_buffer=False) as table:
            names, columns = table.schema_arrow.names, [str(column) for column in row_format.columns]
            if missing := [column for column in columns if names.count(column) != 1]:
                raise TaskError(
                    f"{file.uri}: no column {missing[0]!r} (it has {', '.join(names)})", remedy=_FIELDS_REMEDY
                )
            chosen = [*columns, *(column for column in row_format.optional if column in names)]
            for batch in table.iter_batches(_BATCH_ROWS, columns=chosen, use_threads=False):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{file.uri}: not a Parquet file, or a damaged one: {error}", remedy="write or fetch the file again"
        ) from error
