"""Finds documents with equal hashes over all chunks, one range of hashes at a time so that memory is bounded.

For each chunk a pass has stored the sorted hashes of its documents' texts or ids, and the ids in the same order. A
compare task reads one range of hashes of all chunks. It writes for each chunk which documents are copies of which
earlier document, and how many copies the first documents have. "Earlier" is the order of chunks, then of documents
within a chunk, so the result does not depend on the order of tasks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.ingest.deduplicate import is_equal_to_previous, partition_ranges
from data_service.ingest.tasks import hash_strings, put_unless_empty
from data_service.prepare.layout import (
    BUCKET_COUNT,
    STARTS_BYTES,
    BucketsTask,
    ByChunkReceipt,
    PrepareLayout,
    StoredRecords,
    bucket_starts,
    locate_chunk_parts,
)
from data_service.store.base import Store, digest, parallel_map

_PARTITION_DOCUMENTS = 1_000_000  # documents per task: about 250 MB of memory
# A document's hash as two big-endian words, its number in its chunk, the number of input documents that it represents,
# and the byte range of its id in the ids after the records.
_HASH_RECORD_DTYPE = np.dtype(
    [("high", ">u8"), ("low", ">u8"), ("ordinal", "<u4"), ("weight", "<u4"), ("id_start", "<u8"), ("id_length", "<u4")]
)
_CLUSTERS_SCHEMA = pa.schema([("ordinal", pa.uint32()), ("weight", pa.int64()), ("copy_of", pa.string())])


class HashCollector:
    """Collects the hashes of a chunk's documents, with ids and weights."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._weights, self._ids = array("I"), list[bytes]()

    def add(self, text: str, document_id: str, weight: int = 1) -> None:
        """Add a document. `text`: the text to compare; `weight`: number of input documents that it represents."""
        self._digests += blake2b(text.encode(), digest_size=16).digest()
        self._ids.append(document_id.encode())
        self._weights.append(min(weight, 0xFFFFFFFF))

    def store(self, store: Store, key: str) -> StoredRecords:
        """Store the sorted hashes and, after them, the ids. Return their description for the receipt."""
        words = np.frombuffer(self._digests, dtype=">u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))
        ids = [self._ids[place] for place in order.tolist()]
        records = np.empty(len(words), dtype=_HASH_RECORD_DTYPE)
        records["high"], records["low"], records["ordinal"] = words[order, 0], words[order, 1], order
        records["weight"] = np.asarray(self._weights, dtype=np.uint32)[order]
        records["id_length"] = [*map(len, ids)]
        records["id_start"] = np.cumsum(records["id_length"], dtype=np.int64) - records["id_length"]
        data = bucket_starts(records["high"].astype(np.uint64)) + records.tobytes() + b"".join(ids) if ids else b""
        put_unless_empty(store, key, data)
        return StoredRecords(key, digest(data), len(data), len(records))


class CompareHashesTask(BucketsTask):
    """The task of comparing the hashes of one partition, that is, one range of hashes of all chunks."""

    stage: ClassVar[str] = "compare"
    dtype: ClassVar[np.dtype[np.void]] = _HASH_RECORD_DTYPE


class CompareHashesReceipt(ByChunkReceipt):
    """The result of comparing a partition: a table of clusters for each chunk.

    Attributes:
        copies: number of documents that are copies of an earlier document.
        first_copy: (chunk, number in the chunk) of a copy and of its original; None without copies.
    """

    copies: int
    first_copy: tuple[tuple[int, int], tuple[int, int]] | None


def plan_compare_tasks(layout: PrepareLayout, kind: str, chunks: Sequence[StoredRecords]) -> list[CompareHashesTask]:
    """Return one task for each partition of the hash space, of about `_PARTITION_DOCUMENTS` documents."""
    documents = sum(chunk.records for chunk in chunks)
    source = hash_strings(chunk.digest for chunk in chunks)
    return [
        CompareHashesTask(layout, index, source, kind, tuple(chunks), buckets)
        for index, buckets in enumerate(partition_ranges(documents, _PARTITION_DOCUMENTS, BUCKET_COUNT))
    ]


def compare_hashes(task: CompareHashesTask, store: Store) -> CompareHashesReceipt:
    """Write which documents of the partition are copies of an earlier document; return the receipt."""
    read = list(parallel_map(partial(_read_hashes_and_ids, store, task.buckets), task.chunks))
    parts = [records for records, _ in read]
    records, names = np.concatenate(parts), b"".join(ids for _, ids in read)
    chunk = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    rows, first, weights = _find_clusters(records, chunk)
    copies = rows != first
    ends = np.cumsum(records["id_length"], dtype=np.int64)
    starts = ends - records["id_length"]
    copy_of = [
        names[starts[one] : ends[one]].decode() if copy else None
        for one, copy in zip(first.tolist(), copies.tolist(), strict=True)
    ]
    table = make_clusters_table(records["ordinal"][rows].astype(np.uint32), weights, copy_of)
    data, offsets = group_by_chunk(table, chunk[rows], len(parts))
    place = int(np.flatnonzero(copies)[0]) if copies.any() else None

    def record_location(row: np.int64) -> tuple[int, int]:
        return int(chunk[row]), int(records["ordinal"][row])

    return CompareHashesReceipt(
        source=task.source,
        files=put_unless_empty(store, task.output_key(), data),
        starts=offsets,
        digest=digest(data),
        copies=int(copies.sum()),
        first_copy=None if place is None else (record_location(rows[place]), record_location(first[place])),
    )


def _read_hashes_and_ids(
    store: Store, buckets: tuple[int, int], chunk: StoredRecords
) -> tuple[NDArray[np.void], bytes]:
    """Return a chunk's records with hashes in `buckets`, and the ids of their documents, joined."""
    records = chunk.read_records(store, _HASH_RECORD_DTYPE, buckets)
    if not len(records):
        return records, b""
    start, stop = int(records["id_start"][0]), int(records["id_start"][-1] + records["id_length"][-1])
    ids = STARTS_BYTES + chunk.records * _HASH_RECORD_DTYPE.itemsize
    return records, store.get_range(chunk.key, ids + start, stop - start)


def _find_clusters(
    records: NDArray[np.void], chunk: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return three arrays [M] for the M documents that share a hash: the row of each in `records`, the row of the first
    document with its hash, and the total weight of documents with its hash. `chunk`: [N] the chunk of each record."""
    order = np.lexsort((records["ordinal"], chunk, records["low"], records["high"]))
    found = records[order]
    begins = np.append(np.ones(min(1, len(order)), dtype=np.bool_), ~is_equal_to_previous(found))
    cluster = np.cumsum(begins) - 1
    weights = np.zeros(int(begins.sum()), dtype=np.int64)
    np.add.at(weights, cluster, found["weight"])
    several = np.bincount(cluster)[cluster] > 1
    return order[several], order[begins][cluster][several], weights[cluster][several]


def make_clusters_table(
    ordinals: NDArray[np.uint32], weights: NDArray[np.int64], copy_of: Sequence[str | None]
) -> pa.Table:
    """Return the table of the documents in clusters, for the next pass.

    Args:
        ordinals: [N] number of the document in its chunk.
        weights: [N] number of input documents in its cluster.
        copy_of: [N] id of the cluster's first document; None for that document itself.
    """
    columns = [pa.array(ordinals), pa.array(weights, pa.int64()), pa.array(copy_of, pa.string())]
    return pa.table(columns, schema=_CLUSTERS_SCHEMA)


def group_by_chunk(table: pa.Table, chunk: NDArray[np.uint32], count: int) -> tuple[bytes, list[int]]:
    """Return the joined Arrow streams of `count` chunks, and [count + 1] offsets: each stream's beginning, and the end.
    A stream holds the rows of `table` of its chunk; it is empty without rows. `chunk`: the chunk of each row."""
    order = np.lexsort((table.column("ordinal").to_numpy(), chunk))
    table, edges = table.take(pa.array(order)), np.searchsorted(chunk[order], np.arange(count + 1)).tolist()
    streams = []
    for start, stop in pairwise(edges):
        sink = pa.BufferOutputStream()
        if stop > start:
            with pa.ipc.new_stream(sink, _CLUSTERS_SCHEMA) as writer:
                writer.write_table(table.slice(start, stop - start).combine_chunks())
        streams.append(sink.getvalue().to_pybytes())
    return b"".join(streams), [0, *accumulate(map(len, streams))]


@dataclass(frozen=True)
class ChunkClusters:
    """Where the clusters of a chunk's documents are stored. `slices`: (key, start, length) of the chunk's tables;
    `digest`: hash of the tables of all chunks."""

    slices: tuple[tuple[str, int, int], ...]
    digest: str

    def read_clusters(self, store: Store) -> tuple[dict[int, str], dict[int, int]]:
        """Return two dicts by the number of a document in its chunk: for copies the id of the first document, for first
        documents the size of the cluster."""
        copies: dict[int, str] = {}
        weights: dict[int, int] = {}
        for key, start, length in self.slices:
            table = pa.ipc.open_stream(store.get_range(key, start, length)).read_all()
            for ordinal, weight, copy_of in zip(*(column.to_pylist() for column in table.columns), strict=True):
                if copy_of is None:
                    weights[ordinal] = weight
                else:
                    copies[ordinal] = copy_of
        return copies, weights


def locate_clusters(chunk: int, compared: Sequence[CompareHashesReceipt]) -> ChunkClusters:
    """Return where the clusters of a chunk's documents are stored."""
    return ChunkClusters(locate_chunk_parts(chunk, compared), hash_strings(receipt.digest for receipt in compared))
