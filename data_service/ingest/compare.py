"""Between the passes: finds later copies, one range of hashes at a time, so that memory stays flat."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.hashing import BUCKETS, RECORD, hash_of
from data_service.ingest.layout import Layout
from data_service.ingest.receipts import Receipt, write_receipt
from data_service.ingest.scan import Scanned
from data_service.ingest.tasks import Task
from data_service.store.base import Store
from data_service.store.together import together

PARTITION_DOCUMENTS = 2_000_000  # about 200 MB while they are sorted
ORDINAL = np.dtype("<u4")


@dataclass(frozen=True)
class Slice:
    """Bytes [start, start + length) of an object."""

    key: str
    start: int
    length: int


@dataclass(frozen=True)
class CompareTask(Task):
    """One partition: for every split, in order, the slice of its sorted hashes that falls in it.

    `source` covers all hashes of all splits.
    """

    layout: Layout
    index: int
    hashes: tuple[Slice | None, ...]
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


class Compared(Receipt):
    """What is dropped of a partition.

    Attributes:
        starts: [splits + 1], where each split's documents to drop begin in the partition's ordinals.
        digest: hash of starts and ordinals.
    """

    starts: list[int]
    digest: str


def plan_partitions(layout: Layout, scanned: list[Scanned]) -> list[CompareTask]:
    """Partitions of the hash space that hold about `PARTITION_DOCUMENTS` documents each."""
    documents = sum(split.documents for split in scanned)
    count = min(BUCKETS, max(1, -(-documents // PARTITION_DOCUMENTS)))
    edges = [BUCKETS * i // count for i in range(count + 1)]
    source = hash_of(split.digest for split in scanned)
    return [
        CompareTask(
            layout,
            index,
            tuple(_slice(layout, i, first, stop, s) for i, s in enumerate(scanned)),
            source,
        )
        for index, (first, stop) in enumerate(pairwise(edges))
    ]


def _slice(layout: Layout, index: int, first: int, stop: int, split: Scanned) -> Slice | None:
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
    later = order[1:][_same_as_before(records[order])]
    later = later[np.lexsort((records["ordinal"][later], split[later]))]
    ordinals = records["ordinal"][later].astype(ORDINAL)
    starts = np.searchsorted(split[later], np.arange(len(parts) + 1)).tolist()
    files: dict[str, int] = {}
    if len(ordinals):
        key = task.layout.drops(task.index)
        store.put(key, ordinals.tobytes())
        files[key] = ordinals.nbytes
    digest = hash_of([str(starts), ordinals.tobytes().hex()])
    compared = Compared(source=task.source, files=files, starts=starts, digest=digest)
    write_receipt(store, task.receipt, compared)
    return compared


def _read(store: Store, part: Slice | None) -> bytes:
    return store.get_range(part.key, part.start, part.length) if part else b""


def drop_slices(layout: Layout, split: int, compared: list[Compared]) -> tuple[Slice, ...]:
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
