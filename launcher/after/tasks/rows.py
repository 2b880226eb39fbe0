"""Readers of rows in tables and files of lines, and of their texts, labels and scores."""

import csv
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from data_service.ingest.files import open_ranged
from data_service.ingest.formats import possible_delimiters
from data_service.ingest.inputs import InputFile
from launcher.after.tasks.files import FilePosition, read_lines
from launcher.after.tasks.schema import Description, Format
from launcher.errors import TaskError

_LONGEST_FIELD = 1 << 30  # characters; the csv module has 128 Ki
_ROWS = 1024  # number of rows of a Parquet file in memory at a time
_READ_AHEAD = 64 * 1024  # bytes of a Parquet file that are read at a time
_log = logging.getLogger("launcher.after.tasks")


@dataclass(frozen=True)
class RowFormat:
    """The format of a file of rows.

    Attributes:
        format: jsonl, tsv, csv, parquet, txt, label_first or trec.
        columns: names of fields that a table must have, or numbers of columns from 1.
        optional: names of further fields, which are read if a Parquet file has them.
        encoding: encoding of text.
        delimiter: character between columns; None if it must be found.
        quoted: whether cells may be in quotation marks.
        skip_broken: whether rows with a wrong number of cells are left out and counted.
    """

    format: Format
    columns: tuple[str | int, ...]
    optional: tuple[str, ...] = ()
    encoding: str = "utf-8"
    delimiter: str | None = None
    quoted: bool = False
    skip_broken: bool = False

    @property
    def numbered(self) -> bool:
        """Whether columns have numbers, so that the file has no first line with names."""
        return any(isinstance(column, int) for column in self.columns)


def layout_of(task: Description) -> RowFormat:
    """Return the layout that a task's YAML describes."""
    return RowFormat(
        format=task.format,
        columns=tuple(task.fields.named().values()),
        encoding=task.encoding,
        delimiter=task.delimiter,
        quoted=task.format == "csv" if task.quotes is None else task.quotes,
        skip_broken=task.broken_rows == "skip",
    )


@dataclass(frozen=True, slots=True)
class FileRow:
    """A record of a file.

    Attributes:
        place: position of the record, for messages.
        values: values of the fields by name, or by the column's number as text.
    """

    place: FilePosition
    values: Mapping[str, object]

    def value(self, name: str) -> object:
        """Return the value of a field. Raises TaskError if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            found = ", ".join(str(key)[:40] for key in self.values)
            problem = "is null" if name in self.values else f"is missing (there are {found})"
            raise TaskError(
                f"{self.place}: the field {name!r} {problem}",
                remedy="correct the file, or the task's `fields`",
            )
        return value

    def text(self, name: str) -> str:
        """Return the text of a field; a list of texts is joined with spaces (CSL's keywords). Raises TaskError if the
        value is not text, or not valid Unicode."""
        value = self.value(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = " ".join(value)
        if not isinstance(value, str):
            raise TaskError(
                f"{self.place}: the field {name!r} is {type(value).__name__}, not text",
                remedy="correct the file, or the task's `fields`",
            )
        return valid_text(value, self.place)

    def label(self, name: str) -> str:
        """Return the label as the task's `labels` spell it. Raises TaskError if it is missing, or no name or number."""
        value = self.value(name)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str | int | float):
            return str(value)
        raise TaskError(
            f"{self.place}: the label is {type(value).__name__}, not a name or a number",
            remedy="correct the file, or the task's `fields`",
        )


def valid_text(text: str, place: FilePosition | str) -> str:
    """Return `text`. Raises TaskError if it holds half a surrogate pair, which JSON allows but no tokenizer reads."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TaskError(
                f"{place}: character {error.start} is half a surrogate pair, which is not text",
                remedy="correct or remove the record",
            ) from error
    return text


def label_index(label: str, place: FilePosition, task: Description) -> int:
    """Return the index of a label. Raises TaskError if it is none of the task's labels."""
    if task.label_ids and label.isdecimal() and int(label) < len(task.labels):
        return int(label)
    if not task.label_ids and label in task.labels:
        return task.labels.index(label)
    known = f"an index below {len(task.labels)}" if task.label_ids else f"one of {_listed(task.labels)}"
    raise TaskError(
        f"{place}: the label {label!r} is not {known}",
        remedy="correct the file or the task's `labels`; list values that mean no label in `skip_labels`",
    )


def score_value(label: str, place: FilePosition, task: Description) -> float:
    """Return a score. Raises TaskError if it is not a finite number, or outside of the task's range."""
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise TaskError(
            f"{place}: the score {label!r} is not a finite number",
            remedy="correct the file; list values that mean no score in `skip_labels`",
        )
    if task.score_range is not None and not task.score_range[0] <= score <= task.score_range[1]:
        low, high = task.score_range
        raise TaskError(
            f"{place}: the score {label} is not between {low:g} and {high:g}",
            remedy="correct the file or the task's `score_range`",
        )
    return score


def read_rows(layout: RowFormat, file: InputFile) -> Iterator[FileRow]:
    """Yield the rows of a file, without blank lines.

    Raises:
        TaskError: if a row or line is broken, or a column is missing.
        InputError, StoreError: if the file cannot be read.
    """
    match layout.format:
        case "jsonl":
            yield from _json_lines(layout, file)
        case "parquet":
            columns = [str(column) for column in layout.columns]
            for number, values in enumerate(read_parquet(file, columns, layout.optional)):
                yield FileRow(FilePosition(file, "row", number), values)
        case "txt":
            for place, line in _filled_lines(layout, file):
                yield FileRow(place, {"first": line})
        case "label_first" | "trec":
            yield from _label_first(layout, file)
        case _:
            yield from _table(layout, file)


def _filled_lines(layout: RowFormat, file: InputFile) -> Iterator[tuple[FilePosition, str]]:
    for number, line in enumerate(read_lines(file, layout.encoding), 1):
        if line.strip():
            yield FilePosition(file, "line", number), line


def _json_lines(layout: RowFormat, file: InputFile) -> Iterator[FileRow]:
    for place, line in _filled_lines(layout, file):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            one = (
                "; convert it to JSON lines, one object a line (jq -c)" if line.strip() in ("[", "{") else ""
            )
            raise TaskError(f"{place}: not JSON: {error}", remedy=f"correct the line{one}") from error
        if not isinstance(record, dict):
            raise TaskError(
                f"{place}: a JSON {type(record).__name__}, not an object",
                remedy="write one object on each line",
            )
        yield FileRow(place, record)


def _label_first(layout: RowFormat, file: InputFile) -> Iterator[FileRow]:
    """Yield rows of lines like `3 a stirring film`, or TREC's `NUM:dist How far is it ...` without its fine label."""
    for place, line in _filled_lines(layout, file):
        label, _, text = line.partition(" ")
        coarse, colon, _ = label.partition(":")
        if not text.strip() or (layout.format == "trec" and not colon):
            wanted = "LABEL:detail" if layout.format == "trec" else "a label"
            raise TaskError(f"{place}: not {wanted}, a space and a text", remedy="correct the line")
        yield FileRow(place, {"label": coarse if layout.format == "trec" else label, "first": text.strip()})


def _table(layout: RowFormat, file: InputFile) -> Iterator[FileRow]:
    delimiter = _delimiter(layout, file)
    cells = _quoted_cells(layout, file, delimiter) if layout.quoted else _plain_cells(layout, file, delimiter)
    names = None if layout.numbered else _header(cells, layout, file)
    least = max((column for column in layout.columns if isinstance(column, int)), default=0)
    broken = 0
    for place, row in cells:
        if (len(row) < least) if names is None else (len(row) != len(names)):
            if not layout.skip_broken:
                raise _misfit(place, len(row), least, names)
            broken += 1
            continue
        keys = names or [str(number) for number in range(1, len(row) + 1)]
        yield FileRow(place, dict(zip(keys, row, strict=True)))
    if broken:
        _log.warning("%s: left out %d rows with a wrong number of fields", file.uri, broken)


def _delimiter(layout: RowFormat, file: InputFile) -> str:
    """Return the first delimiter that yields the columns that the task names; if none does, the one that yields most
    columns."""
    usual, *others = possible_delimiters(layout.format, layout.delimiter)
    if layout.numbered or not others:
        return usual
    first = next(read_lines(file, layout.encoding), "")
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE
    names = {delimiter: _names_in(first, delimiter, quoting) for delimiter in (usual, *others)}
    wanted = [str(column) for column in layout.columns]
    fitting = (one for one in names if all(names[one].count(name) == 1 for name in wanted))
    return next(fitting, max(names, key=lambda one: len(names[one])))


def _names_in(line: str, delimiter: str, quoting: Literal[0, 3]) -> list[str]:
    """Return the names in a line; none if it is not valid CSV. The reader of the rows reports that error, with the
    place."""
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter, quoting=quoting), [])]
    except csv.Error:
        return []


def _misfit(place: FilePosition, count: int, least: int, names: list[str] | None) -> TaskError:
    there = f"{count} field{'s' if count != 1 else ''}"
    wanted = f"but column {least} is needed" if names is None else f"where the first line names {len(names)}"
    return TaskError(
        f"{place}: {there}, {wanted}",
        remedy="correct the file; or set the character between columns (`delimiter`) in the task, or leave such rows "
        "out (`broken_rows: skip`)",
    )


def _header(cells: Iterator[tuple[FilePosition, list[str]]], layout: RowFormat, file: InputFile) -> list[str]:
    _, first = next(cells, (None, []))
    names = [name.strip() for name in first]
    for wanted in (str(column) for column in layout.columns):
        if names.count(wanted) != 1:
            count = "two columns" if wanted in names else "no column"
            shown = ", ".join(name[:40] for name in names[:20])
            raise TaskError(
                f"{file.uri}: {count} {wanted!r} in its first line (it has {shown})",
                remedy="correct the task's `fields`; use numbers of columns if no line names the columns; set the "
                "character between columns with `delimiter`",
            )
    return names


def _plain_cells(
    layout: RowFormat, file: InputFile, delimiter: str
) -> Iterator[tuple[FilePosition, list[str]]]:
    for number, line in enumerate(read_lines(file, layout.encoding), 1):
        if line:
            yield FilePosition(file, "line", number), line.split(delimiter)


def _quoted_cells(
    layout: RowFormat, file: InputFile, delimiter: str
) -> Iterator[tuple[FilePosition, list[str]]]:
    csv.field_size_limit(_LONGEST_FIELD)  # for the whole process
    lines = (f"{line}\n" for line in read_lines(file, layout.encoding))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        place = FilePosition(file, "line", rows.line_num + 1)
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise TaskError(
                f"{place}: not {layout.format.upper()}: {error}",
                remedy="quote fields as RFC 4180 requires, or set `quotes: false` in the task",
            ) from error
        if row:
            yield place, row


def _listed(labels: list[str]) -> str:
    return ", ".join(labels[:12]) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")


def read_parquet(
    file: InputFile, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Yield the rows of a Parquet file as Python values, with those `optional` columns that the file has.

    Raises:
        TaskError: if the file is damaged or lacks a column.
        StoreError: if it cannot be read.
    """
    import pyarrow as pa  # a run's ranks never read a table, and need not load its library
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(open_ranged(file, chunk=_READ_AHEAD), pre_buffer=False) as table:
            names = table.schema_arrow.names
            if missing := [column for column in columns if names.count(column) != 1]:
                raise TaskError(
                    f"{file.uri}: no column {missing[0]!r} (it has {', '.join(names)})",
                    remedy="correct the task's `fields`",
                )
            chosen = [*columns, *(column for column in optional if column in names)]
            for batch in table.iter_batches(_ROWS, columns=chosen, use_threads=False):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{file.uri}: not a Parquet file, or a damaged one: {error}", remedy="write or fetch it again"
        ) from error
