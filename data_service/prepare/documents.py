"""The documents that `prepare` reads, keeps and drops, and the Parquet files that hold them.

A part is made in memory, a row group at a time, and stored as one object. Equal rows give equal bytes.
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

_ROW_GROUP_BYTES = 8 << 20  # bytes of text in a row group; `corpus build` cuts its work at row groups
_ROW_GROUP_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        id: name that no other document of the preparation has.
        text: its text.
        source: name of the input that it came from.
        url, licence, language, date: values that the input states, as text; None where it states none.
        cluster_size: number of documents that this one stands for: itself and its copies.
        cluster: name of the cluster of near duplicates to which it belongs, if all of them are kept; None if it is
            alone.
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
    """The decision to leave a document out. `reason`: kind of reason; `detail`: the values behind it."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CutDecision:
    """The decision to keep a document without a part of its text. `reason`: kind of reason, which statistics count."""

    document: Document
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedDocument:
    """A document that was left out.

    Attributes:
        id, source: as in `Document`. A record that could not be read has its place as id.
        stage: label of the stage that dropped it; `read` if it is empty or could not be read.
        reason: kind of reason, which statistics count.
        detail: the values behind it, such as the document of which it is a copy.
    """

    id: str
    source: str
    stage: str
    reason: str
    detail: str = ""


def encode_content(document: Document | DroppedDocument) -> bytes:
    """Return the bytes of a document as it was read, by which it is told whether it changed."""
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
    """Return the schema of kept documents. `clusters`: digest of the clusters of which all documents are kept, which
    `corpus build` finds in the file; empty if there are none.
    """
    if not clusters:
        return KEPT_SCHEMA
    return KEPT_SCHEMA.append(pa.field(CLUSTER_COLUMN, pa.string())).with_metadata({CLUSTERS_METADATA_KEY: clusters})


DROPPED_SCHEMA = pa.schema([pa.field(field.name, pa.string(), nullable=False) for field in fields(DroppedDocument)])


class RowsWriter:
    """Collects rows of a part: `Document`s (schema `kept_schema`) or `DroppedDocument`s (schema `DROPPED_SCHEMA`)."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[Document | DroppedDocument] = []
        self._size = 0

    def add(self, row: Document | DroppedDocument) -> None:
        self._rows.append(row)
        self._size += len(row.text) if isinstance(row, Document) else 0
        if self._size >= _ROW_GROUP_BYTES or len(self._rows) >= _ROW_GROUP_ROWS:
            self._flush()

    def store(self, store: Store, key: str) -> dict[str, int]:
        """Store the part under `key`, unless it has no row. Return the sizes of the stored objects, by key."""
        return put_unless_empty(store, key, self.finish())

    def finish(self) -> memoryview:
        """Return the part's bytes; none if it has no row."""
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
    """Yield the documents of a part with a schema of `kept_schema`."""
    with pq.ParquetFile(pa.BufferReader(data)) as table:
        names = table.schema_arrow.names
        for batch in table.iter_batches(1024, use_threads=False):
            columns: list[list[Any]] = [batch.column(name).to_pylist() for name in names]
            for row in zip(*columns, strict=True):
                yield Document(*row)
