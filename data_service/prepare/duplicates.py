"""Finds documents with equal hashes over all chunks, one range of hashes at a time so that memory is bounded.

Each chunk leaves its hashes, sorted, with the documents' ids in the same order. A compare task reads one range of all
chunks, and writes for each chunk which of its documents are copies of which earlier one, and how many copies the
others have. Documents are ordered by chunk, then by place in it, so the result depends on nothing else.
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

_PARTITION_DOCUMENTS = 1_000_000  # documents that are compared together, in about 250 MB
# A document's hash as two big-endian words, its number in its chunk, the number of documents that it stands for, and
# the place of its id among the ids behind the records, in bytes.
_HASH_RECORD_DTYPE = np.dtype(
    [("high", ">u8"), ("low", ">u8"), ("ordinal", "<u4"), ("weight", "<u4"), ("id_start", "<u8"), ("id_length", "<u4")]
)
_CLUSTERS_SCHEMA = pa.schema([("ordinal", pa.uint32()), ("weight", pa.int64()), ("copy_of", pa.string())])


class HashCollector:
    """The hashes of a chunk's documents."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._weights, self._ids = array("I"), list[bytes]()

    def add(self, text: str, document_id: str, weight: int = 1) -> None:
        """Add a document by the text that is compared."""
        self._digests += blake2b(text.encode(), digest_size=16).digest()
        self._ids.append(document_id.encode())
        self._weights.append(min(weight, 0xFFFFFFFF))

    def store(self, store: Store, key: str) -> StoredRecords:
        """Store the sorted hashes and, behind them, the ids. Return what the receipt says of them."""
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
    """The task of comparing the hashes of one partition."""

    stage: ClassVar[str] = "compare"
    dtype: ClassVar[np.dtype[np.void]] = _HASH_RECORD_DTYPE


class CompareHashesReceipt(ByChunkReceipt):
    """The result of comparing a partition: a table of clusters for each chunk.

    Attributes:
        copies: number of documents that are copies of another.
        first_copy: (chunk, number in it) of a copy and of the document that it is a copy of; None without copies.
    """

    copies: int
    first_copy: tuple[tuple[int, int], tuple[int, int]] | None


def plan_compare_tasks(layout: PrepareLayout, kind: str, chunks: Sequence[StoredRecords]) -> list[CompareHashesTask]:
    """Cut the hash space into partitions of about `_PARTITION_DOCUMENTS` documents."""
    documents = sum(chunk.records for chunk in chunks)
    source = hash_strings(chunk.digest for chunk in chunks)
    return [
        CompareHashesTask(layout, index, source, kind, tuple(chunks), buckets)
        for index, buckets in enumerate(partition_ranges(documents, _PARTITION_DOCUMENTS, BUCKET_COUNT))
    ]


def compare_hashes(task: CompareHashesTask, store: Store) -> CompareHashesReceipt:
    """Write which documents of the partition are copies of an earlier one; return the receipt."""
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
    records = chunk.read_records(store, _HASH_RECORD_DTYPE, buckets)
    if not len(records):
        return records, b""
    start, stop = int(records["id_start"][0]), int(records["id_start"][-1] + records["id_length"][-1])
    ids = STARTS_BYTES + chunk.records * _HASH_RECORD_DTYPE.itemsize
    return records, store.get_range(chunk.key, ids + start, stop - start)


def _find_clusters(
    records: NDArray[np.void], chunk: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each document that has a copy: its row, the row of the first of its cluster, the cluster's weight."""
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
    """Return the table of the documents in clusters that the next pass reads.

    Args:
        ordinals: [N] number of each in its chunk.
        weights: [N] number of documents for which its cluster stands.
        copy_of: id of the document that stays; None for that document itself.
    """
    columns = [pa.array(ordinals), pa.array(weights, pa.int64()), pa.array(copy_of, pa.string())]
    return pa.table(columns, schema=_CLUSTERS_SCHEMA)


def group_by_chunk(table: pa.Table, chunk: NDArray[np.uint32], count: int) -> tuple[bytes, list[int]]:
    """Return one Arrow stream a chunk that has rows, joined; and [count + 1] at which byte each begins."""
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
    """What is known of a chunk's documents that have copies. `slices`: (key, start, length) of its tables; `digest`:
    of all partitions."""

    slices: tuple[tuple[str, int, int], ...]
    digest: str

    def read_clusters(self, store: Store) -> tuple[dict[int, str], dict[int, int]]:
        """Return the ids of the documents of which documents are copies, and the sizes of clusters, both by number of
        the document in its chunk."""
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
