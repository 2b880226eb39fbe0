"""Removes later copies of documents. The first pass of a build has hashed all documents. Here the hashes are compared,
one range of them at a time, so that memory is bounded. The second pass leaves the copies out.

Another pass divides the kept documents into stretches. It runs only if stretches are held out, not whole documents
(`heldout.py`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_service.corpus.manifest import BuildLayout
from data_service.errors import InputError
from data_service.ingest.documents import read_documents
from data_service.ingest.heldout import (
    MAX_HELDOUT_CANDIDATES,
    DocumentFigures,
    candidate_hash_threshold,
    hash_threshold,
    mean_stretch_bytes,
    split_into_stretches,
)
from data_service.ingest.records import TextRecord
from data_service.ingest.scan import (
    DIGEST_BYTES,
    HASH_BUCKETS,
    HASH_RECORD_DTYPE,
    ScanReceipt,
    bytes_for_split_digest,
    collapse_spaces,
    digests_in_order,
    hash_document,
)
from data_service.ingest.tasks import BuildTask, SplitTask, TaskReceipt, hash_strings, put_unless_empty
from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing

PARTITION_DOCUMENTS = 2_000_000  # documents that are sorted together; needs about 200 MB of memory
ORDINAL_DTYPE = np.dtype("<u4")  # a document's number in its split, as stored


@dataclass(frozen=True)
class ObjectSlice:
    """Bytes [start, start + length) of an object."""

    key: str
    start: int
    length: int


@dataclass(frozen=True)
class PartitionTask(BuildTask):
    """A task on one range of hashes. `hashes`: for each split, the slice of its sorted hashes in that range."""

    hashes: tuple[ObjectSlice | None, ...]

    @property
    def input_bytes(self) -> int:
        return sum(part.length for part in self.hashes if part)

    def read_records(self, store: Store) -> tuple[NDArray[np.void], NDArray[np.uint32]]:
        """Return the hash records of the partition [N], and the split number of each record [N]."""

        def read(part: ObjectSlice | None) -> bytes:
            return store.get_range(part.key, part.start, part.length) if part else b""

        parts = [np.frombuffer(data, dtype=HASH_RECORD_DTYPE) for data in parallel_map(read, self.hashes)]
        split = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
        return np.concatenate(parts), split


@dataclass(frozen=True)
class CompareTask(PartitionTask):
    """The task of finding copies in one partition of the documents' hashes.

    `source`: hash of all hashes of all splits. `clusters`: whether documents name clusters of near duplicates; then
    only the first half of a hash tells which texts are equal (`hash_document`).
    """

    heldout_fraction: float
    clusters: bool = False

    stage: ClassVar[str] = "compare"


class CompareReceipt(TaskReceipt):
    """The result of comparing the hashes in a partition.

    Attributes:
        starts: [splits + 1], index at which each split's copies begin in the stored list of the copies' ordinals.
        digest: hash of starts and ordinals.
        documents, size, held_documents, held_size, candidates: as in `heldout.DocumentFigures`, for this partition.
    """

    starts: list[int]
    digest: str
    documents: int
    size: int
    held_documents: int
    held_size: int
    candidates: list[tuple[int, int]]


def plan_partitions(
    layout: BuildLayout, scanned: list[ScanReceipt], heldout_fraction: float, clusters: bool = False
) -> list[CompareTask]:
    """Return the tasks that compare the documents, each for a range of hashes of about `PARTITION_DOCUMENTS`."""
    documents = sum(split.documents for split in scanned)
    source = hash_strings(split.digest for split in scanned)
    starts = [(layout.document_hashes_key(number), split.buckets) for number, split in enumerate(scanned)]
    return [
        CompareTask(layout, index, source, part, heldout_fraction, clusters)
        for index, part in enumerate(partition_hashes(starts, documents))
    ]


def partition_hashes(starts: list[tuple[str, list[int]]], documents: int) -> Iterator[tuple[ObjectSlice | None, ...]]:
    """Yield each split's slice of hashes for every partition: a range of hashes of about `PARTITION_DOCUMENTS`.

    `starts`: for each split the key of its sorted hashes and their `bucket_starts`.
    """
    for first, stop in partition_ranges(documents, PARTITION_DOCUMENTS):
        yield tuple(_bucket_slice(key, buckets[first], buckets[stop]) for key, buckets in starts)


def partition_ranges(documents: int, max_documents: int, buckets: int = HASH_BUCKETS) -> list[tuple[int, int]]:
    """Return consecutive ranges of the hash buckets, each of about `max_documents` documents."""
    count = min(buckets, max(1, -(-documents // max_documents)))
    return list(pairwise(buckets * i // count for i in range(count + 1)))


def _bucket_slice(key: str, begin: int, end: int) -> ObjectSlice | None:
    """Return the slice of an object that holds its hash records `begin` to `end`; None if there are none."""
    if begin == end:
        return None
    return ObjectSlice(key, begin * HASH_RECORD_DTYPE.itemsize, (end - begin) * HASH_RECORD_DTYPE.itemsize)


def compare_partition(task: CompareTask, store: Store) -> CompareReceipt:
    """Store the ordinals of the partition's documents that are copies of an earlier one; return the receipt."""
    records, split = task.read_records(store)
    place = (records["ordinal"], split)
    # Equal texts may belong to different clusters if a preparation stage changed them after the clustering.
    if task.clusters:
        order = np.lexsort((*place, records["high"]))
        same = records["high"][order][1:] == records["high"][order][:-1]
    else:
        order = np.lexsort((*place, records["low"], records["high"]))
        same = is_equal_to_previous(records[order])
    is_later = np.append(np.zeros(min(1, len(order)), dtype=np.bool_), same)
    later, kept = order[is_later], records[order[~is_later]]
    if len(kept):  # copies may differ in line ends: the size of the shortest counts
        kept["size"] = np.minimum.reduceat(records["size"][order], np.flatnonzero(~is_later))
    later = later[np.lexsort((records["ordinal"][later], split[later]))]
    ordinals = records["ordinal"][later].astype(ORDINAL_DTYPE)
    starts = np.searchsorted(split[later], np.arange(len(task.hashes) + 1)).tolist()
    held = kept[kept["low"].astype(np.uint64) < np.uint64(hash_threshold(task.heldout_fraction))]
    return CompareReceipt(
        source=task.source,
        files=put_unless_empty(store, task.layout.duplicate_documents_key(task.index), ordinals.tobytes()),
        starts=starts,
        digest=hash_strings([str(starts), ordinals.tobytes().hex()]),
        documents=len(kept),
        size=int(kept["size"].sum(dtype=np.int64)),
        held_documents=len(held),
        held_size=int(held["size"].sum(dtype=np.int64)),
        candidates=_heldout_candidates(kept, task.clusters),
    )


def sum_document_figures(compared: list[CompareReceipt]) -> DocumentFigures:
    """Return the sums over all partitions, and the documents with the smallest low words (candidates to hold out)."""
    candidates = sorted(pair for part in compared for pair in part.candidates)
    return DocumentFigures(
        count=sum(part.documents for part in compared),
        size=sum(part.size for part in compared),
        held_count=sum(part.held_documents for part in compared),
        held_size=sum(part.held_size for part in compared),
        candidates=candidates[:MAX_HELDOUT_CANDIDATES],
    )


def _heldout_candidates(kept: NDArray[np.void], clusters: bool) -> list[tuple[int, int]]:
    """Return (low word, bytes) of the documents with the smallest low words, which are held out first. With clusters,
    the bytes of all documents with the same low word are added up."""
    low = kept["low"].astype(np.uint64)
    if clusters:
        low, of_low = np.unique(low, return_inverse=True)
        sizes = np.zeros(len(low), dtype=np.int64)
        np.add.at(sizes, of_low, kept["size"].astype(np.int64))
        return list(zip(low[:MAX_HELDOUT_CANDIDATES].tolist(), sizes[:MAX_HELDOUT_CANDIDATES].tolist(), strict=True))
    first = np.lexsort((kept["size"], low))[:MAX_HELDOUT_CANDIDATES]
    return list(zip(low[first].tolist(), kept["size"][first].tolist(), strict=True))


def find_drop_ranges(layout: BuildLayout, split: int, compared: list[CompareReceipt]) -> tuple[ObjectSlice, ...]:
    """Return the slices of objects that hold the ordinals of the documents to drop from a split."""
    return tuple(
        ObjectSlice(
            layout.duplicate_documents_key(partition),
            begin * ORDINAL_DTYPE.itemsize,
            (end - begin) * ORDINAL_DTYPE.itemsize,
        )
        for partition, (begin, end) in enumerate((part.starts[split], part.starts[split + 1]) for part in compared)
        if end > begin
    )


def is_equal_to_previous(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return [N - 1] bool: whether each sorted record after the first has the same hash as the one before it."""
    high, low = records["high"], records["low"]
    same: NDArray[np.bool_] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return same


@dataclass(frozen=True)
class KeptDocuments:
    """The documents of a split that are not copies of earlier ones.

    `drops`: slices that list the copies; `digest`: hash of the split's hashes in the first pass; `source`: hash of
    `digest` and all copies; `clusters`: whether the inputs name clusters, so that hashes do not depend on text alone.
    """

    drops: tuple[ObjectSlice, ...]
    digest: str
    source: str
    clusters: bool = False


def read_kept_documents(task: SplitTask, kept: KeptDocuments, store: Store) -> Iterator[tuple[TextRecord, bytes]]:
    """Yield (document, hash) of each document of the task's split that is kept.

    Raises:
        InputError: the text changed since the first pass; otherwise as in `read_documents`.
    """
    drops = read_dropped_ordinals(store, kept.drops)
    digests = b"" if kept.clusters else _read_digests(store, task)
    seen = hashlib.sha256()
    ordinal = 0
    for document in read_documents(task.split, task.options):
        if document.is_blank:
            continue
        known = digests[DIGEST_BYTES * ordinal : DIGEST_BYTES * (ordinal + 1)]
        digest = hash_document(document, task.options, known)
        seen.update(bytes_for_split_digest(digest, document))
        if ordinal not in drops:
            yield document, digest
        ordinal += 1
    if seen.hexdigest() != kept.digest:
        raise InputError(
            f"{task.split.pieces[0].file.uri} (or one of the {len(task.split.pieces)} inputs read with it) "
            "changed while the corpus was built",
            remedy="run the same command again when the inputs no longer change: it reads the changed files again",
        )


def _read_digests(store: Store, task: SplitTask) -> bytes:
    """Return the hashes of the split's documents from the first pass, joined in order; empty without documents."""
    try:
        found = store.get(task.layout.document_hashes_key(task.index))
    except KeyMissing:
        return b""
    return digests_in_order(np.frombuffer(found, dtype=HASH_RECORD_DTYPE))


def read_dropped_ordinals(store: Store, slices: tuple[ObjectSlice, ...]) -> set[int]:
    """Return the ordinals of the documents that are left out as copies."""
    ordinals = (np.frombuffer(store.get_range(s.key, s.start, s.length), dtype=ORDINAL_DTYPE) for s in slices)
    return {ordinal for part in ordinals for ordinal in part.tolist()}


@dataclass(frozen=True)
class FindStretchesTask(SplitTask):
    """The task of dividing the kept documents of a split into stretches.

    Attributes:
        kept: documents that are not copies of earlier ones.
        size: bytes of the text of all splits.
    """

    kept: KeptDocuments
    size: int

    stage: ClassVar[str] = "divide"


class FindStretchesReceipt(TaskReceipt):
    """The stretches of a split.

    `candidates`: (low word of a paragraph's hash, bytes of the stretches that end with this paragraph), for low words
    below `candidate_hash_threshold`; `clustered`: low words from documents with near duplicates, which may contain the
    same paragraph with small changes.
    """

    candidates: list[tuple[int, int]]
    clustered: list[int] = Field(default_factory=list)


def find_split_stretches(task: FindStretchesTask, store: Store) -> FindStretchesReceipt:
    """Read the split and find its stretches; return the receipt. Raises the errors of `read_kept_documents`."""
    fraction = task.options.heldout_fraction
    length, below = mean_stretch_bytes(task.size, fraction), candidate_hash_threshold(task.size, fraction)
    sizes: Counter[int] = Counter()
    clustered: set[int] = set()
    for document, _ in read_kept_documents(task, task.kept, store):
        for stretch, end in split_into_stretches(document.text, length):
            if end is not None and end < below:
                sizes[end] += len(collapse_spaces(stretch).encode())
                if document.cluster_name is not None:
                    clustered.add(end)
    return FindStretchesReceipt(source=task.source, candidates=sorted(sizes.items()), clustered=sorted(clustered))
