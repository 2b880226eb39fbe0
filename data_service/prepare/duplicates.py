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
from data_service.ingest.scan import bucket_starts
from data_service.ingest.tasks import TaskReceipt, hash_strings, put_unless_empty
from data_service.prepare.layout import ComparingTask, PrepareLayout, StoredChunk
from data_service.store.base import Store, digest, parallel_map

_PARTITION_DOCUMENTS = 1_000_000  # documents that are compared together, in about 250 MB
# A document's hash as two big-endian words, its number in its chunk, the number of documents that it stands for, and
# the bytes of its id.
_HASH_RECORD_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8"), ("ordinal", "<u4"), ("weight", "<u4"), ("id", "<u4")])
# (key, start, length) of records, and of their ids.
RecordAndIdRanges = tuple[tuple[str, int, int], tuple[str, int, int]]
_CLUSTERS_SCHEMA = pa.schema([("ordinal", pa.uint32()), ("weight", pa.int64()), ("copy_of", pa.string())])


class HashCollector:
    """The hashes of a chunk's documents."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._weights, self._lengths, self._ids = array("I"), array("I"), list[bytes]()

    def add(self, text: str, document_id: str, weight: int = 1) -> None:
        """Add a document by the text that is compared. `document_id`: its id."""
        self._digests += blake2b(text.encode(), digest_size=16).digest()
        self._ids.append(document_id.encode())
        self._lengths.append(len(self._ids[-1]))
        self._weights.append(min(weight, 0xFFFFFFFF))

    def store(self, store: Store, key: str) -> "HashedChunk":
        """Store the sorted hashes and, behind them, the ids. Return what the receipt says of them."""
        words = np.frombuffer(self._digests, dtype=">u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))
        records = np.empty(len(words), dtype=_HASH_RECORD_DTYPE)
        records["high"], records["low"], records["ordinal"] = words[order, 0], words[order, 1], order
        records["weight"] = np.asarray(self._weights, dtype=np.uint32)[order]
        records["id"] = np.asarray(self._lengths, dtype=np.uint32)[order]
        buckets = bucket_starts(records)
        ends = [0, *accumulate(records["id"].tolist())]
        data = records.tobytes() + b"".join(self._ids[place] for place in order.tolist())
        put_unless_empty(store, key, data)
        return HashedChunk(key, digest(data), len(data), buckets, [ends[place] for place in buckets])


@dataclass(frozen=True)
class HashedChunk(StoredChunk):
    """The stored hashes of a chunk.

    Attributes:
        buckets: [BUCKETS + 1], number of the record at which each first byte of the hash begins, and the end.
        ids: [BUCKETS + 1], byte of the joined ids at which it begins, and the end.
    """

    buckets: list[int]
    ids: list[int]

    def locate_buckets(self, first: int, stop: int) -> RecordAndIdRanges | None:
        """Return where the records and the ids of buckets [first, stop) are; None if there are none."""
        begin, end = self.buckets[first], self.buckets[stop]
        if begin == end:
            return None
        names = self.buckets[-1] * _HASH_RECORD_DTYPE.itemsize
        records = (self.key, begin * _HASH_RECORD_DTYPE.itemsize, (end - begin) * _HASH_RECORD_DTYPE.itemsize)
        return records, (self.key, names + self.ids[first], self.ids[stop] - self.ids[first])


@dataclass(frozen=True)
class CompareHashesTask(ComparingTask):
    """The task of comparing the hashes of one partition. `slices`: of each chunk, where its records and ids are."""

    slices: tuple[RecordAndIdRanges | None, ...]

    stage: ClassVar[str] = "compare"

    @property
    def input_bytes(self) -> int:
        return sum(found[0][2] for found in self.slices if found)


class CompareHashesReceipt(TaskReceipt):
    """The result of comparing a partition.

    Attributes:
        starts: [chunks + 1], byte at which the table of each chunk begins in the stored object, and the end.
        digest: digest of the object.
        copies: number of documents that are copies of another.
        first_copy: (chunk, number in it) of a copy and of the document that it is a copy of; None without copies.
    """

    starts: list[int]
    digest: str
    copies: int
    first_copy: tuple[tuple[int, int], tuple[int, int]] | None


def plan_compare_tasks(layout: PrepareLayout, kind: str, chunks: Sequence[HashedChunk]) -> list[CompareHashesTask]:
    """Cut the hash space into partitions of about `_PARTITION_DOCUMENTS` documents."""
    documents = sum(chunk.buckets[-1] for chunk in chunks)
    source = hash_strings(chunk.digest for chunk in chunks)
    return [
        CompareHashesTask(layout, index, source, kind, tuple(chunk.locate_buckets(first, stop) for chunk in chunks))
        for index, (first, stop) in enumerate(partition_ranges(documents, _PARTITION_DOCUMENTS))
    ]


def compare_hashes(task: CompareHashesTask, store: Store) -> CompareHashesReceipt:
    """Write which documents of the partition are copies of an earlier one; return the receipt."""
    read = list(parallel_map(partial(_read_slices, store), task.slices))
    parts = [np.frombuffer(records, dtype=_HASH_RECORD_DTYPE) for records, _ in read]
    records, names = np.concatenate(parts), b"".join(ids for _, ids in read)
    chunk = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    rows, first, weights = _find_clusters(records, chunk)
    copies = rows != first
    ends = np.cumsum(records["id"], dtype=np.int64)
    starts = ends - records["id"]
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
        files=put_unless_empty(store, task.layout.clusters_key(task.kind, task.index), data),
        starts=offsets,
        digest=digest(data),
        copies=int(copies.sum()),
        first_copy=None if place is None else (record_location(rows[place]), record_location(first[place])),
    )


def _find_clusters(
    records: NDArray[np.void], chunk: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each document that has a copy: its row, the row of the first of its cluster, the cluster's weight."""
    order = np.lexsort((records["ordinal"], chunk, records["low"], records["high"]))
    found = records[order]
    begins = np.append(np.ones(min(1, len(order)), dtype=np.bool_), ~is_equal_to_previous(found))
    begin = np.flatnonzero(begins)
    if not len(begin):
        return order, order, order
    sizes = np.diff(np.append(begin, len(order)))
    weights = np.add.reduceat(found["weight"].astype(np.int64), begin)
    several = np.repeat(sizes > 1, sizes)
    return order[several], np.repeat(order[begin], sizes)[several], np.repeat(weights, sizes)[several]


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


def _read_slices(store: Store, wanted: RecordAndIdRanges | None) -> tuple[bytes, bytes]:
    if wanted is None:
        return b"", b""
    records, ids = wanted
    return store.get_range(*records), store.get_range(*ids) if ids[2] else b""


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


def locate_clusters(
    chunk: int, layout: PrepareLayout, kind: str, compared: Sequence[CompareHashesReceipt]
) -> ChunkClusters:
    """Return where the clusters of a chunk's documents are stored."""
    slices = tuple(
        (
            layout.clusters_key(kind, partition),
            receipt.starts[chunk],
            receipt.starts[chunk + 1] - receipt.starts[chunk],
        )
        for partition, receipt in enumerate(compared)
        if receipt.starts[chunk + 1] > receipt.starts[chunk]
    )
    return ChunkClusters(slices, hash_strings(receipt.digest for receipt in compared))
