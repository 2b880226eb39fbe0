"""Between the passes: finds later copies, one range of hashes at a time so that memory stays bounded, and counts the
other documents."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BuildLayout
from data_service.ingest.hashing import BUCKETS, RECORD, hash_of
from data_service.ingest.heldout import CANDIDATES, Documents, bound
from data_service.ingest.scan import Scanned
from data_service.ingest.tasks import BuildTask, TaskReceipt, write_receipt
from data_service.store.base import Store, together

PARTITION_DOCUMENTS = 2_000_000  # about 200 MB while they are sorted
ORDINAL = np.dtype("<u4")


@dataclass(frozen=True)
class Slice:
    """Bytes [start, start + length) of an object."""

    key: str
    start: int
    length: int


@dataclass(frozen=True)
class CompareTask(BuildTask):
    """One partition: for every split, in order, the slice of its sorted hashes that falls in it.

    `source` covers all hashes of all splits.
    """

    layout: BuildLayout
    index: int
    hashes: tuple[Slice | None, ...]
    heldout_fraction: float
    source: str

    @property
    def receipt(self) -> str:
        return self.layout.receipt("compare", self.index)

    @property
    def input_bytes(self) -> int:
        return sum(part.length for part in self.hashes if part)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)


class Compared(TaskReceipt):
    """What was found in a partition.

    Attributes:
        starts: [splits + 1], where each split's documents to drop begin in the partition's ordinals.
        digest: hash of starts and ordinals.
        documents, size, held_documents, held_size, candidates: as in `heldout.Documents`, of this partition.
    """

    starts: list[int]
    digest: str
    documents: int
    size: int
    held_documents: int
    held_size: int
    candidates: list[tuple[int, int]]


def plan_partitions(
    layout: BuildLayout, scanned: list[Scanned], heldout_fraction: float
) -> list[CompareTask]:
    """Cuts the hash space into partitions that hold about `PARTITION_DOCUMENTS` documents each."""
    documents = sum(split.documents for split in scanned)
    count = min(BUCKETS, max(1, -(-documents // PARTITION_DOCUMENTS)))
    edges = [BUCKETS * i // count for i in range(count + 1)]
    source = hash_of(split.digest for split in scanned)
    return [
        CompareTask(
            layout,
            index,
            tuple(_slice(layout, i, first, stop, s) for i, s in enumerate(scanned)),
            heldout_fraction,
            source,
        )
        for index, (first, stop) in enumerate(pairwise(edges))
    ]


def _slice(layout: BuildLayout, index: int, first: int, stop: int, split: Scanned) -> Slice | None:
    begin, end = split.buckets[first], split.buckets[stop]
    if begin == end:
        return None
    return Slice(layout.hashes(index), begin * RECORD.itemsize, (end - begin) * RECORD.itemsize)


def compare(task: CompareTask) -> Compared:
    """Write which documents of the partition are copies of one that comes before them in the input."""
    store = task.layout.open()
    parts = [np.frombuffer(data, dtype=RECORD) for data in together(partial(_read, store), task.hashes)]
    records = np.concatenate(parts)
    split = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    order = np.lexsort((records["ordinal"], split, records["low"], records["high"]))
    is_later = np.append(np.zeros(min(1, len(order)), dtype=np.bool_), _same_as_before(records[order]))
    later, kept = order[is_later], records[order[~is_later]]
    if len(kept):  # copies differ in line ends: the shortest counts, whichever comes first
        kept["size"] = np.minimum.reduceat(records["size"][order], np.flatnonzero(~is_later))
    later = later[np.lexsort((records["ordinal"][later], split[later]))]
    ordinals = records["ordinal"][later].astype(ORDINAL)
    starts = np.searchsorted(split[later], np.arange(len(parts) + 1)).tolist()
    files: dict[str, int] = {}
    if len(ordinals):
        key = task.layout.drops(task.index)
        store.put(key, ordinals.tobytes())
        files[key] = ordinals.nbytes
    held = kept[kept["low"].astype(np.uint64) < np.uint64(bound(task.heldout_fraction))]
    compared = Compared(
        source=task.source,
        files=files,
        starts=starts,
        digest=hash_of([str(starts), ordinals.tobytes().hex()]),
        documents=len(kept),
        size=int(kept["size"].sum(dtype=np.int64)),
        held_documents=len(held),
        held_size=int(held["size"].sum(dtype=np.int64)),
        candidates=_smallest(kept),
    )
    write_receipt(store, task.receipt, compared)
    return compared


def _read(store: Store, part: Slice | None) -> bytes:
    return store.get_range(part.key, part.start, part.length) if part else b""


def count_documents(compared: list[Compared]) -> Documents:
    """What all partitions found."""
    candidates = sorted(pair for part in compared for pair in part.candidates)
    return Documents(
        count=sum(part.documents for part in compared),
        size=sum(part.size for part in compared),
        held_count=sum(part.held_documents for part in compared),
        held_size=sum(part.held_size for part in compared),
        candidates=candidates[:CANDIDATES],
    )


def _smallest(kept: NDArray[np.void]) -> list[tuple[int, int]]:
    """(low word, bytes) of the documents that would be held out first."""
    low = kept["low"].astype(np.uint64)
    first = np.lexsort((kept["size"], low))[:CANDIDATES]
    return list(zip(low[first].tolist(), kept["size"][first].tolist(), strict=True))


def drop_slices(layout: BuildLayout, split: int, compared: list[Compared]) -> tuple[Slice, ...]:
    """Where the ordinals of the documents to drop from a split are written."""
    return tuple(
        Slice(layout.drops(partition), begin * ORDINAL.itemsize, (end - begin) * ORDINAL.itemsize)
        for partition, (begin, end) in enumerate(
            (part.starts[split], part.starts[split + 1]) for part in compared
        )
        if end > begin
    )


def _same_as_before(records: NDArray[np.void]) -> NDArray[np.bool_]:
    high, low = records["high"], records["low"]
    same: NDArray[np.bool_] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return same
