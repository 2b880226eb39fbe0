"""Reads tables, Parquet and Arrow files: one document per row, in one column of strings, a few hundred rows at a time.

Strings are read as bytes and decoded here, because Arrow does not check that they are UTF-8. Binary columns are read in
the same way. Only readers of such files import this module, because importing pyarrow takes long.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_service.corpus.provenance import DuplicateCluster
from data_service.errors import InputError
from data_service.ingest.files import open_stored_bytes
from data_service.ingest.inputs import InputFile
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import BadRecord, TextRecord, parse_record, try_read
from data_service.ingest.tasks import FilePiece

CLUSTER_COLUMN = "cluster"
CLUSTERS_METADATA_KEY = "maskfleet_clusters"
"""The column with the cluster's name, and the entry in the file's metadata with the digest of all clusters. Only files
of documents that were prepared with clusters have them."""

_BATCH_ROWS = 256  # rows that are converted at a time
_READ_AHEAD_BYTES = 64 * 1024  # bytes of one read of a Parquet file
_COLUMN_REMEDY = (
    "name the column that holds the text with --text-field (of pairs: --query-field, --positive-field, "
    "--negatives-field)"
)
_VIEW_TYPES = (pa.string_view(), pa.binary_view())
_TEXT_TYPES = (  # Arrow's types of columns that are read as text
    *(pa.string(), pa.large_string(), *_VIEW_TYPES),
    *(pa.binary(), pa.large_binary()),  # many writers declare text columns as bytes only
)
_FILE_MAGIC = b"ARROW1"  # first bytes of Arrow's file format; streams, as `datasets` writes them, have none


def read_parquet(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of the row groups that begin inside the piece. A record is bad if it is null, not
    UTF-8 or too long.

    Raises:
        InputError: the file is damaged, or a column is missing or not text.
    """
    file = piece.file
    with (
        _report_damaged_file(file, "Parquet"),
        pq.ParquetFile(open_stored_bytes(file, chunk_bytes=_READ_AHEAD_BYTES), pre_buffer=False) as table,
    ):
        columns = _columns_to_read(table.schema_arrow, file, options)
        clusters = _clusters_digest_from_schema(table.schema_arrow, file, options)
        if clusters:
            columns = list(dict.fromkeys([*columns, CLUSTER_COLUMN]))
        first = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if piece.start <= _row_group_start(table.metadata.row_group(group)) < piece.stop:
                row = first
                for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    yield from _read_rows(batch, row, file, options, clusters)
                    row += len(batch)
            first += rows


def _clusters_digest_from_schema(schema: pa.Schema, file: InputFile, options: BuildOptions) -> str:
    """Return the digest of the clusters that a file of prepared documents names; empty if it names none.

    Raises:
        InputError: the column with the names of the clusters is missing.
    """
    found: bytes | None = (schema.metadata or {}).get(CLUSTERS_METADATA_KEY.encode())
    if found is None or options.pairs is not None:
        return ""
    if schema.names.count(CLUSTER_COLUMN) != 1:
        raise InputError(
            f"{file.uri}: its documents were prepared with clusters, but it has no column {CLUSTER_COLUMN!r}",
            remedy="give the file as `corpus prepare` wrote it, or prepare the documents again",
        )
    return found.decode()


def read_clusters_digest(file: InputFile) -> bytes:
    """Return the digest of the clusters that a Parquet file of prepared documents names; empty if it names none."""
    schema = pq.read_schema(open_stored_bytes(file, chunk_bytes=_READ_AHEAD_BYTES))
    found: bytes = (schema.metadata or {}).get(CLUSTERS_METADATA_KEY.encode(), b"")
    return found


def read_arrow(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a whole .arrow file, in the stream or the file format. Records are bad as in Parquet.

    Raises:
        InputError: the file is damaged, or a column is missing or not text.
    """
    file, row = piece.file, 0
    with _report_damaged_file(file, "Arrow"), open_stored_bytes(file) as stream:
        for batch in _read_batches(stream, file, options):
            for start in range(0, len(batch), _BATCH_ROWS):
                yield from _read_rows(batch.slice(start, _BATCH_ROWS), row + start, file, options)
            row += len(batch)


def _read_batches(stream: BinaryIO, file: InputFile, options: BuildOptions) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of the file, with only the columns that are needed."""
    with_footer = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    stream.seek(0)
    open_ipc = pa.ipc.open_file if with_footer else pa.ipc.open_stream
    schema = open_ipc(stream).schema
    stream.seek(0)
    fields = [schema.get_field_index(_column_path(schema, name)[0]) for name in _columns_to_read(schema, file, options)]
    only = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    reader = open_ipc(stream, options=only)
    if with_footer:
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from reader


def _read_rows(
    batch: pa.RecordBatch, first_row: int, file: InputFile, options: BuildOptions, clusters: str = ""
) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a batch, whose first row is row `first_row` of the file."""
    metadata_names = set(options.metadata_fields or ()) - {options.text_field}
    columns = {
        name: (_to_metadata_values if name in metadata_names else _to_byte_values)(_column_values(batch, name))
        for name in options.required_fields
    }
    there = (name for name in options.optional_fields if _column_type(batch.schema, name) is not None)
    columns |= {name: _to_metadata_values(_column_values(batch, name)) for name in there}
    names = batch.column(CLUSTER_COLUMN).cast(pa.string()).to_pylist() if clusters else []
    for index in range(len(batch)):
        values = {name: column[index] for name, column in columns.items()}
        found = try_read(options, _parse_row, values, RecordPlace(file, "row", first_row + index), options)
        if clusters and isinstance(found, TextRecord):
            found = replace(found, cluster=DuplicateCluster(clusters, names[index]))
        yield found


def _to_byte_values(values: pa.Array) -> list[object]:
    """Return a column's values: texts as bytes, lists of texts as lists of bytes."""
    plain = _decode_strings(values)
    if _is_list(plain.type):
        plain = plain.cast(pa.large_list(plain.type.value_type))
        texts = _decode_strings(plain.flatten()).cast(pa.large_binary()).to_pylist()
        ends = np.cumsum(pc.list_value_length(plain).fill_null(0).to_numpy(zero_copy_only=False))
        starts = [0, *ends.tolist()]
        return [
            None if missing else texts[start:stop]
            for missing, start, stop in zip(plain.is_null().to_pylist(), starts[:-1], starts[1:], strict=True)
        ]
    found: list[object] = plain.cast(pa.large_binary()).to_pylist()
    return found


def _to_metadata_values(values: pa.Array) -> list[object]:
    """Return a column's values: texts as bytes; numbers, dates and times as the strings that Arrow makes of them."""
    plain = _decode_strings(values)
    if _is_text(plain.type):
        return _to_byte_values(plain)
    nested = pa.types.is_nested(plain.type)
    found: list[object] = plain.to_pylist() if nested else plain.cast(pa.string()).to_pylist()
    return found


def _parse_row(values: Mapping[str, object], place: RecordPlace, options: BuildOptions) -> TextRecord:
    if options.pairs is None and not isinstance(values[options.text_field], bytes):
        raise BadRecord(place, f"column {options.text_field!r} is null", "drop the row from the file")
    return parse_record(values, options, place)


def _decode_strings(values: pa.Array) -> pa.Array:
    """Return the plain strings of a column that stores them as a dictionary, as runs or as an extension type."""
    if isinstance(values, pa.DictionaryArray):
        if values.dictionary.type not in _VIEW_TYPES:
            return _decode_strings(values.dictionary_decode())
        # Arrow decodes dictionaries of views only value by value. Casting the dictionary for each batch is slower.
        viewed = pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(pa.binary_view()))
        return pa.array(viewed.to_pylist(), pa.large_binary())
    if isinstance(values, pa.RunEndEncodedArray):
        plain = _decode_strings(values.values)
        plain = plain.cast(pa.large_binary()) if plain.type in _VIEW_TYPES else plain
        kind = pa.run_end_encoded(values.type.run_end_type, plain.type)
        parts = [values.run_ends, plain]
        runs = pa.RunEndEncodedArray.from_buffers(kind, len(values), [None], 0, values.offset, parts)
        return pc.run_end_decode(runs)
    return _decode_strings(values.storage) if isinstance(values, pa.ExtensionArray) else values


def _row_group_start(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return int(column.dictionary_page_offset or column.data_page_offset)


def _columns_to_read(schema: pa.Schema, file: InputFile, options: BuildOptions) -> list[str]:
    """Return the names of the columns to read. Raises InputError: one is missing, duplicated, or not text."""
    lists = options.word_fields if options.pairs is None else options.pairs.negatives
    metadata_names = set(options.metadata_fields or ()) - {options.text_field}
    for column in options.required_fields:
        _check_column(schema, file, column, lists=column in lists, any_type=column in metadata_names)
    there = [name for name in options.optional_fields if _column_path(schema, name)[0] in schema.names]
    for column in there:
        _required_column_type(schema, file, column)
    return [*options.required_fields, *there]


def _column_path(schema: pa.Schema, name: str) -> list[str]:
    """Return the path of a column, or of a field in a struct column: `meta`, `text` for `meta.text`."""
    return [name] if name in schema.names else name.split(".")


def _column_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Return the type of a column, or of a field in a struct column; None if it is missing or duplicated."""
    kind = pa.struct(list(schema))
    for part in _column_path(schema, name):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _column_values(batch: pa.RecordBatch, name: str) -> pa.Array:
    first, *inside = _column_path(batch.schema, name)
    return pc.struct_field(batch.column(first), inside) if inside else batch.column(first)


def _required_column_type(schema: pa.Schema, file: InputFile, column: str) -> pa.DataType:
    kind = _column_type(schema, column)
    if kind is None:
        raise InputError(
            f"{file.uri}: {'two columns' if column in schema.names else 'no column'} {column!r} "
            f"(it has {', '.join(schema.names)})",
            remedy=_COLUMN_REMEDY,
        )
    return kind


def _check_column(schema: pa.Schema, file: InputFile, column: str, *, lists: bool, any_type: bool) -> None:
    """Raise InputError unless the column holds text, or is allowed to hold lists of texts or any type."""
    kind = _required_column_type(schema, file, column)
    if any_type:
        return
    if not (_is_text(kind) or (lists and _is_list(kind) and _is_text(kind.value_type))):
        raise InputError(f"{file.uri}: column {column!r} has type {kind}, not string", remedy=_COLUMN_REMEDY)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_text(kind.storage_type)
    if isinstance(kind, pa.DictionaryType | pa.RunEndEncodedType):
        return _is_text(kind.value_type)
    return kind in _TEXT_TYPES


@contextmanager
def _report_damaged_file(file: InputFile, name: str) -> Iterator[None]:
    """Turn errors of Arrow's reader into InputError. `name`: the format, for the message."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file.uri}: not {'an' if name == 'Arrow' else 'a'} {name} file, or a damaged one: {error}",
            remedy="write or fetch the file again",
        ) from error
