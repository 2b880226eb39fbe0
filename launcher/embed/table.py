"""Rows of texts with labels, from JSON lines, TSV, CSV and Parquet. Every mistake has file, line and remedy."""

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data_service.errors import InputError
from data_service.store.open import open_store
from launcher.embed.settings import Table

Row = tuple[int, dict[str, object]]  # line (of Parquet: row), from 1, and what stands there
_PLAIN = (".jsonl", ".tsv", ".csv")
_MOST_FIELD = 1 << 24  # characters of one field of a CSV


@dataclass(frozen=True)
class Rows:
    """What a table holds.

    Attributes:
        texts: by column, in the order of the loss; equally long.
        labels: indices into the table's classes, or scores from 0 to 1; None where there is no label.
        ignored: rows left out for their labels.
    """

    texts: dict[str, list[str]]
    labels: list[int] | list[float] | None
    ignored: int

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        data = json.dumps([self.texts, self.labels], ensure_ascii=False)
        return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()


def read_table(table: Table) -> Rows:
    """All rows that count.

    Raises:
        InputError: a file that is not there, is empty or cannot be read; a column missing; a text that is empty; a
            label that is none of the classes; a score that is no number, or outside the range. StoreError kinds.
    """
    texts: dict[str, list[str]] = {column: [] for column in table.texts}
    labels: list[Any] = []
    ignored = 0
    for file in table.files:
        for number, row in _rows(file, table):
            _check_columns(file, number, row, table)
            if any(str(row[column]) != value for column, value in table.where.items()):
                continue
            if table.label is not None and str(row[table.label]) in table.ignore:
                ignored += 1
                continue
            for column in table.texts:
                texts[column].append(_text(row[column], f"{file}, line {number}: {column}"))
            if table.label is not None:
                labels.append(_label(row[table.label], table, f"{file}, line {number}: {table.label}"))
    if not texts[table.texts[0]]:
        raise InputError(
            f"{', '.join(table.files)}: no row to use",
            remedy="give files with rows, and check `where` and `ignore`",
        )
    return Rows(texts, labels if table.label is not None else None, ignored)


def _rows(file: str, table: Table) -> Iterator[Row]:
    kind, data = _content(file)
    match kind:
        case ".parquet":
            return _parquet(file, data, table)
        case ".jsonl":
            return _jsonl(file, _decoded(file, data))
        case _:
            return _delimited(file, _decoded(file, data), table, tab=kind == ".tsv")


def _content(file: str) -> tuple[str, bytes]:
    """Form and bytes of a file, uncompressed."""
    folder, _, name = file.rpartition("/")
    root = file.removesuffix(".gz").removesuffix(".zst") if not file.endswith(".parquet.gz") else file
    kind = next((suffix for suffix in (*_PLAIN, ".parquet") if root.endswith(suffix)), None)
    if kind is None or (kind == ".parquet" and root != file):
        raise InputError(
            f"{file} is of no known form",
            remedy=f"give {', '.join(_PLAIN)} (also with .gz or .zst) or .parquet",
        )
    store = open_store(folder or ("/" if file.startswith("/") else "."))
    if store.size(name) is None:
        raise InputError(f"{file} does not exist", remedy="give the file's path or s3:// URI in `files`")
    raw = store.get(name)
    try:
        if file.endswith(".gz"):
            raw = gzip.decompress(raw)
        elif file.endswith(".zst"):
            raw = zstandard.ZstdDecompressor().stream_reader(raw).read()
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise InputError(f"{file} is damaged: {error}", remedy="fetch the file again") from error
    if not raw:
        raise InputError(f"{file} is empty", remedy="give a file with rows")
    return kind, raw


def _decoded(file: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}, line {line}: not UTF-8", remedy="convert the file to UTF-8") from error


def _jsonl(file: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file}, line {number}: not JSON: {error}", remedy="correct the line"
            ) from error
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number}: not an object", remedy='write {"column": "text", ...}')
        yield number, row


def _delimited(file: str, text: str, table: Table, *, tab: bool) -> Iterator[Row]:
    """Tabs without quotation marks, as GLUE and SemEval have them; commas with."""
    csv.field_size_limit(_MOST_FIELD)
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {"strict": True}
    reader = csv.reader(io.StringIO(text, newline=""), **form)
    header = table.header
    try:
        for fields in reader:
            if header is None:
                header = tuple(fields)
                continue
            if not fields:
                continue
            if len(fields) != len(header):
                raise InputError(
                    f"{file}, line {reader.line_num}: {len(fields)} fields, and there are {len(header)} columns",
                    remedy="correct the line; a first line without names needs `header`",
                )
            yield reader.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise InputError(f"{file}, line {reader.line_num}: {error}", remedy="correct the line") from error


def _parquet(file: str, data: bytes, table: Table) -> Iterator[Row]:
    try:
        source = pq.ParquetFile(io.BytesIO(data))
        present = [name for name in source.schema_arrow.names if name in table.columns]
        batches = source.iter_batches(columns=present)
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} is not Parquet: {error}", remedy="fetch the file again") from error


def _check_columns(file: str, number: int, row: dict[str, object], table: Table) -> None:
    missing = sorted(column for column in table.columns if column not in row)
    if missing:
        there: Sequence[str] = sorted(row)
        raise InputError(
            f"{file}, line {number}: no {', '.join(missing)}",
            remedy=f"give one of its columns in `texts`, `label` or `where`: {', '.join(there)}",
        )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{where} is {json.dumps(value, default=str)}, not a text", remedy="remove or correct that row"
        )
    return value


def _label(value: object, table: Table, where: str) -> int | float:
    if table.classes is not None:
        if str(value) not in table.classes:
            raise InputError(
                f"{where} is {value!r}, which is not in classes: {', '.join(table.classes)}",
                remedy="add it to `classes`, or to `ignore`",
            )
        return table.classes.index(str(value))
    low, high = table.scores
    try:
        score = (
            float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        )
    except ValueError:
        score = math.nan
    if not low <= score <= high:
        raise InputError(
            f"{where} is {value!r}, not a score from {low:g} to {high:g}",
            remedy="correct the row, or give the range of the scores in `scores`",
        )
    return (score - low) / (high - low)
