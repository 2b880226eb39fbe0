"""Sidecars: one Parquet file per shard with the provenance of its documents, one row per document.

Rows are in the order of the shard. If stretches of a document are held out, each stretch, trained or held out, has a
row. Only this module reads and writes sidecars; nothing that streams training data imports it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.corpus import SPLITS, Corpus, SplitName
from data_service.corpus.manifest import StoredFile, sidecar_key
from data_service.corpus.origin import ValueCounter
from data_service.corpus.provenance import PROVENANCE_FIELDS, Provenance, ProvenanceField
from data_service.errors import CorpusError, damaged_corpus
from data_service.store.base import digest, parallel_map
from data_service.store.errors import KeyMissing

if TYPE_CHECKING:  # pyarrow is imported only to read or write a sidecar, which few corpora have
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

RowConditions: TypeAlias = "list[tuple[str, str, object]] | pc.Expression"  # row filters of `pyarrow.parquet`
ROW_GROUP_ROWS = 1 << 14  # rows per Parquet row group, which the writer keeps in memory


@dataclass(frozen=True)
class DocumentOrigin:
    """The location of a document in a corpus, and its provenance.

    Attributes:
        block: number of the block, counted in the split; in a row for `SidecarWriter`, counted in the shard.
        document: number of the document in its block.
        start: offset in the block of the document's first token; `tokens`: number of its tokens.
        provenance: provenance of the document.
        shard: key of the shard; empty in a row for `SidecarWriter`.
    """

    block: int
    document: int
    start: int
    tokens: int
    provenance: Provenance
    shard: str = ""


class SidecarWriter:
    """A writer of one sidecar to a local file, which is created when the first rows are written.

    `counter`: counts of the documents by source, licence and language.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counter = ValueCounter()
        self._rows: list[DocumentOrigin] = []
        self._file: BinaryIO | None = None
        self._writer: "pq.ParquetWriter | None" = None

    def add(self, row: DocumentOrigin) -> None:
        """Append a row, in the order of the shard. Raises OSError: the disk is full."""
        self._rows.append(row)
        self.counter.add(row.provenance, row.tokens)
        if len(self._rows) == ROW_GROUP_ROWS:
            self._flush()

    def finish(self) -> StoredFile | None:
        """Write the remaining rows and close the file; return its size and hash, or None if there was no row."""
        if self._rows:
            self._flush()
        if self._writer is None or self._file is None:
            return None
        self._writer.close()
        self._file.close()
        data = self.path.read_bytes()
        return StoredFile(len(data), digest(data))

    def close(self) -> None:
        """Close the file, whether `finish` was called or not."""
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = {"block": pa.int32(), "document": pa.int32(), "start": pa.int64(), "tokens": pa.int64()}
        schema = pa.schema(
            [pa.field(name, kind, nullable=False) for name, kind in numbers.items()]
            + [pa.field(name, pa.string()) for name in PROVENANCE_FIELDS]
        )
        rows, self._rows = self._rows, []
        columns: dict[str, Sequence[object]] = {name: [getattr(row, name) for row in rows] for name in numbers}
        columns |= {name: [getattr(row.provenance, name) for row in rows] for name in PROVENANCE_FIELDS}
        batch = pa.RecordBatch.from_pydict(columns, schema=schema)
        if self._writer is None:
            self._file = self.path.open("wb")
            self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._writer.write_batch(batch)


def require_provenance(corpus: Corpus) -> None:
    """Raise CorpusError if the corpus was built without provenance."""
    if not corpus.manifest.provenance:
        raise CorpusError(
            f"{corpus.store.uri} was built without provenance: it does not say where its documents come from",
            remedy="build the corpus again with --provenance, which names the input fields that hold it",
        )


def read_origins(
    corpus: Corpus, split: SplitName, shard: str, conditions: "RowConditions | None" = None
) -> Iterator[DocumentOrigin]:
    """Yield the origins of the documents of a shard, in order. Block numbers count in the split.

    `conditions`: row filter for `pyarrow.parquet`, such as `[("id", "==", "17")]`; here `block` counts in the shard.

    Raises:
        CorpusError: the sidecar is missing, or its bytes do not match the manifest's hash.
        StoreError: the store cannot be read.
    """
    first = corpus.table(split).first_block_by_shard[shard]
    for batch in _read_sidecar(corpus, shard, filters=conditions).to_batches(ROW_GROUP_ROWS):
        columns = batch.to_pydict()
        known = zip(*(columns[name] for name in PROVENANCE_FIELDS), strict=True)
        numbers = zip(columns["block"], columns["document"], columns["start"], columns["tokens"], strict=True)
        for (block, document, start, tokens), values in zip(numbers, known, strict=True):
            yield DocumentOrigin(first + block, document, start, tokens, Provenance(*values), shard)


def origins_in_ranges(
    corpus: Corpus, split: SplitName, block: int, token_ranges: Sequence[range]
) -> list[DocumentOrigin]:
    """Return the origins of the documents with tokens in one of these ranges of a block. Raises as `read_origins`."""
    table = corpus.table(split)
    number = block - table.first_block_by_shard[table.block_shard_key(block)]
    rows = read_origins(corpus, split, table.block_shard_key(block), [("block", "==", number)])
    return [
        row
        for row in rows
        if any(row.start < part.stop and part.start < row.start + row.tokens for part in token_ranges)
    ]


@dataclass(frozen=True)
class FoundDocument:
    """A document found by a search. `number`: the document's number in its split, as for `show_documents`."""

    split: SplitName
    number: int
    origin: DocumentOrigin

    def __str__(self) -> str:
        """Return number, location and provenance on one line, as `corpus find` prints them."""
        at = self.origin
        place = f"{at.shard}, block {at.block}, document {at.document}, tokens {at.start} to {at.start + at.tokens}"
        return f"{self.split} {self.number}: {place}: {at.provenance.description}"


def find_documents(corpus: Corpus, **wanted: str) -> Iterator[FoundDocument]:
    """Yield the documents of both splits whose provenance has these values, such as `id="17"`. All sidecars are read.

    Raises:
        CorpusError: the corpus was built without provenance, or a sidecar is damaged.
        StoreError: the store cannot be read.
    """
    require_provenance(corpus)
    yield from _find_matching(corpus, [(name, "==", value) for name, value in wanted.items()])


def find_ids(
    corpus: Corpus, ids: Collection[str], report: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[FoundDocument]:
    """Yield the documents of both splits whose id is one of `ids`. There may be millions of ids.

    `report` is called as (newly read, total), in sidecars. Raises as `find_documents`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    require_provenance(corpus)
    yield from _find_matching(corpus, pc.field("id").isin(pa.array(sorted(ids), pa.string())), report)


def _find_matching(
    corpus: Corpus, where: RowConditions, report: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[FoundDocument]:
    """Yield the documents of both splits that meet the conditions, in order. Sidecars are read in parallel."""
    total = len(corpus.manifest.provenance)
    for split in SPLITS:
        table = corpus.table(split)
        before = table.documents.cumsum() - table.documents

        def read(shard: str, split: SplitName = split) -> list[DocumentOrigin]:
            return list(read_origins(corpus, split, shard, where))

        for rows in parallel_map(read, table.shards):
            for row in rows:
                yield FoundDocument(split, int(before[row.block]) + row.document, row)
            report(1, total)


def read_document_ids(corpus: Corpus, shard: str) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str | None]]:
    """Return for each document of a shard, in order: number of its block in the shard, number in the block, and id.

    Raises as `read_origins`.
    """
    table = _read_sidecar(corpus, shard, columns=["block", "document", "id"])
    numbers = (table.column(name).to_numpy().astype(np.int64) for name in ("block", "document"))
    return *numbers, table.column("id").to_pylist()


@dataclass
class TextCount:
    """An amount of text, in documents and tokens."""

    documents: int = 0
    tokens: int = 0


def count_text_by_field(corpus: Corpus, field: ProvenanceField) -> dict[str | None, dict[SplitName, TextCount]]:
    """Return amounts of text by a field's value, then split; most training tokens first. Raises as `find_documents`."""
    require_provenance(corpus)
    found: dict[str | None, dict[SplitName, TextCount]] = {}
    for split in SPLITS:
        for shard in corpus.table(split).shards:
            table = _read_sidecar(corpus, shard, columns=[field, "tokens"])
            counts = table.group_by(field).aggregate([("tokens", "count"), ("tokens", "sum")]).to_pydict()
            columns = (counts[field], counts["tokens_count"], counts["tokens_sum"])
            for value, documents, tokens in zip(*columns, strict=True):
                share = found.setdefault(value, {part: TextCount() for part in SPLITS})[split]
                share.documents, share.tokens = share.documents + documents, share.tokens + tokens
    return dict(sorted(found.items(), key=lambda item: (-item[1]["train"].tokens, item[0] or "")))


def _read_sidecar(
    corpus: Corpus, shard: str, columns: list[str] | None = None, filters: "RowConditions | None" = None
) -> "pa.Table":
    """Return the rows of a shard's sidecar after checking the file's hash. `filters`: as for `pyarrow.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    key = sidecar_key(shard)
    place = f"{corpus.store.uri.rstrip('/')}/{key}"
    try:
        data = corpus.store.get(key)
    except KeyMissing as error:
        raise damaged_corpus(place, "it is missing") from error
    if digest(data) != corpus.manifest.provenance[key].digest:
        raise damaged_corpus(place, "its bytes do not match the manifest's hash")
    return pq.read_table(pa.BufferReader(data), columns=columns, filters=filters, use_threads=False)
