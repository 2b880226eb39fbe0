"""Parquet: one document a row, in one string column. Read by row groups, a few hundred rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import BuildOptions
from data_service.ingest.ranged import open_ranged
from data_service.ingest.splits import Piece
from data_service.ingest.text import Text, checked

_ROWS = 256
_READ_AHEAD = 64 * 1024


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row is, for messages; rows count from 0 in the file."""

    file: InputFile
    row: int

    def __str__(self) -> str:
        return f"{self.file.uri}, row {self.row}"


def read_parquet(piece: Piece, options: BuildOptions) -> Iterator[Text]:
    """The documents of the row groups that begin inside the piece.

    Raises:
        InputError: a damaged file, a column that is missing or not text, a null, a document too long.
    """
    column = options.text_field
    try:
        with pq.ParquetFile(open_ranged(piece.file, chunk=_READ_AHEAD), pre_buffer=False) as table:
            _check_column(table.schema_arrow, piece.file, column)
            first = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if piece.start <= _group_start(table.metadata.row_group(group)) < piece.stop:
                    yield from _read_group(table, group, first, piece, options)
                first += rows
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"{piece.file.uri}: not a Parquet file, or a damaged one: {error}",
            remedy="write or fetch it again",
        ) from error


def _read_group(
    table: pq.ParquetFile, group: int, row: int, piece: Piece, options: BuildOptions
) -> Iterator[Text]:
    column = options.text_field
    for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[column], use_threads=False):
        for cell in batch.column(0):
            text = cell.as_py()
            place = RowPlace(piece.file, row)
            if text is None:
                raise InputError(f"{place}: column {column!r} is null", remedy="drop the row from the file")
            yield checked(text, options, place)
            row += 1


def _group_start(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return int(column.dictionary_page_offset or column.data_page_offset)


def _check_column(schema: pa.Schema, file: InputFile, column: str) -> None:
    if column not in schema.names:
        raise InputError(
            f"{file.uri}: no column {column!r} (it has {', '.join(schema.names)})",
            remedy="name the column that holds the text with --text-field",
        )
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(
            f"{file.uri}: column {column!r} has type {kind}, not string",
            remedy="name the column that holds the text with --text-field",
        )
