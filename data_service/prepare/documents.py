"""The documents that `prepare` reads, keeps and drops, and the Parquet files that hold them.

A part is one of these files. It is encoded in memory, a row group at a time. Equal rows give equal bytes.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_service.ingest.tables import CLUSTER_COLUMN, CLUSTERS_METADATA_KEY
from data_service.ingest.tasks import put_unless_empty
from data_service.store.base import Store, digest

_ROW_GROUP_CHARACTERS = 8 << 20  # characters of text that end a row group; `corpus build` splits work between them
_ROW_GROUP_ROWS = 16_384  # most rows in a row group


@dataclass(frozen=True, slots=True)
class Document:
    """A document that is read, prepared and kept.

    Attributes:
        id: unique id within the preparation.
        text: the document's text.
        source: name of the input source.
        url, licence, language, date: values that the input states, as text; None for a missing value.
        cluster_size: number of input documents that this one represents: itself and its dropped copies.
        cluster: name of its cluster of near duplicates, recorded if all members are kept (`keep: all`); else None.
    """

    id: str
    text: str
    source: str
    url: str | None = None
    licence: str | None = None
    language: str | None = None
    date: str | None = None
    cluster_size: int = 1
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class DropDecision:
    """The decision to drop a document. `reason`: kind of reason; `detail`: values that explain it."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CutDecision:
    """The decision to keep a document without a part of its text. `reason`: kind of reason, which statistics count."""

    document: Document
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedDocument:
    """A document that was dropped.

    Attributes:
        id, source: as in `Document`. The id of an unreadable record is made of its source, file and position.
        stage: label of the stage that dropped the document; `read` if it is empty or unreadable.
        reason: kind of reason, which statistics count.
        detail: values that explain the reason, such as the id of the document of which it is a copy.
    """

    id: str
    source: str
    stage: str
    reason: str
    detail: str = ""


def encode_content(document: Document | DroppedDocument) -> bytes:
    """Return a document as bytes. Their hash shows whether the input has changed since it was read."""
    return json.dumps(astuple(document)).encode()


KEPT_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(pa.field(name, pa.string()) for name in ("url", "licence", "language", "date")),
        pa.field("cluster_size", pa.int64(), nullable=False),
    ]
)


def kept_schema(clusters: str) -> pa.Schema:
    """Return the schema of kept documents. `clusters`: digest of the clusters whose members are all kept, stored in the
    file for `corpus build`; "" without such clusters."""
    if not clusters:
        return KEPT_SCHEMA
    return KEPT_SCHEMA.append(pa.field(CLUSTER_COLUMN, pa.string())).with_metadata({CLUSTERS_METADATA_KEY: clusters})


DROPPED_SCHEMA = pa.schema([pa.field(field.name, pa.string(), nullable=False) for field in fields(DroppedDocument)])


class RowsWriter:
    """Encodes the rows of a part: `Document`s (schema `kept_schema`) or `DroppedDocument`s (`DROPPED_SCHEMA`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[Document | DroppedDocument] = []
        self._size = 0

    def add(self, row: Document | DroppedDocument) -> None:
        self._rows.append(row)
        self._size += len(row.text) if isinstance(row, Document) else 0
        if self._size >= _ROW_GROUP_CHARACTERS or len(self._rows) >= _ROW_GROUP_ROWS:
            self._flush()

    def store(self, store: Store, key: str) -> dict[str, int]:
        """Store the part under `key`, unless it has no row. Return the sizes of the stored objects, by key."""
        return put_unless_empty(store, key, self.finish())

    def finish(self) -> memoryview:
        """Return the part's bytes; empty if it has no row."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
        self.digest = digest(self._file.getbuffer())
        return self._file.getbuffer()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = {name: [getattr(row, name) for row in self._rows] for name in self._schema.names}
        table = pa.Table.from_pydict(columns, schema=self._schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd")
        self._writer.write_table(table)
        self._rows, self._size = [], 0


def read_part_documents(data: bytes) -> Iterator[Document]:
    """Yield the documents of a part of kept documents."""
    with pq.ParquetFile(pa.BufferReader(data)) as table:
        names = table.schema_arrow.names
        for batch in table.iter_batches(1024, use_threads=False):
            columns: list[list[Any]] = [batch.column(name).to_pylist() for name in names]
            for row in zip(*columns, strict=True):
                yield Document(*row)
