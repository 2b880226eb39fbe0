"""Finds ids that two kept documents share, before anything is written. One range of the hashes of ids is compared at a
time, so that memory is bounded. Copies of a document, which are not kept, may have its id.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BuildLayout
from data_service.errors import InputError
from data_service.ingest.deduplicate import (
    KeptDocuments,
    PartitionTask,
    is_equal_to_previous,
    partition_hashes,
    read_dropped_ordinals,
)
from data_service.ingest.documents import read_documents
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import TextRecord
from data_service.ingest.scan import ScanReceipt
from data_service.ingest.streamed import PieceReader
from data_service.ingest.tasks import InputSplit, TaskReceipt, hash_strings
from data_service.store.base import Store


@dataclass(frozen=True)
class FindRepeatedIdsTask(PartitionTask):
    """The task of finding ids that occur twice in one partition of their hashes. `kept`: documents of each split."""

    kept: tuple[KeptDocuments, ...]

    stage: ClassVar[str] = "ids"


class RepeatedIdsReceipt(TaskReceipt):
    """The repeated ids of a partition. `twice`: (split, document) of the first two with one id; empty without any."""

    twice: list[tuple[int, int]]


def plan_id_tasks(
    layout: BuildLayout, scanned: Sequence[ScanReceipt], kept: Sequence[KeptDocuments]
) -> list[FindRepeatedIdsTask]:
    """Return the tasks that find ids of several documents, each for a range of the ids' hashes."""
    documents = sum(split.documents for split in scanned)
    starts = [(layout.document_id_hashes_key(number), split.id_buckets) for number, split in enumerate(scanned)]
    source = hash_strings(split.source for split in kept)
    return [
        FindRepeatedIdsTask(layout, index, source, part, tuple(kept))
        for index, part in enumerate(partition_hashes(starts, documents))
    ]


def find_repeated_ids(task: FindRepeatedIdsTask, store: Store) -> RepeatedIdsReceipt:
    """Find kept documents with the same id in a partition; return the receipt."""
    records, split = task.read_records(store)
    repeated = _repeated_records(records)
    records, split = records[repeated], split[repeated]
    kept = np.ones(len(records), dtype=np.bool_)
    for number in np.unique(split).tolist():
        drops = read_dropped_ordinals(store, task.kept[number].drops)
        here = np.flatnonzero(split == number)
        kept[here] = [ordinal not in drops for ordinal in records["ordinal"][here].tolist()]
    return RepeatedIdsReceipt(source=task.source, twice=_first_pair_with_equal_id(records[kept], split[kept]))


def _first_pair_with_equal_id(records: NDArray[np.void], split: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Return (split, document) of the first two documents that share an id; empty if none do."""
    at = _repeated_records(records)
    places = zip(split[at].tolist(), records["ordinal"][at].tolist(), strict=True)
    ids = records[["high", "low"]][at].tolist()
    groups = groupby(zip(ids, places, strict=True), key=itemgetter(0))
    return min((sorted(place for _, place in group)[:2] for _, group in groups), default=[])


def _repeated_records(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Return [M] indices of the records whose hash occurs more than once, sorted by hash."""
    order = np.lexsort((records["low"], records["high"]))
    same = is_equal_to_previous(records[order])
    first = np.zeros(min(1, len(order)), dtype=np.bool_)
    repeated: NDArray[np.int64] = order[np.append(first, same) | np.append(same, first)]
    return repeated


def refuse_repeated_ids(
    receipts: Iterable[RepeatedIdsReceipt], splits: Sequence[InputSplit], options: BuildOptions
) -> None:
    """Raise InputError if two documents share an id. The message names both places."""
    twice = min((receipt.twice for receipt in receipts if receipt.twice), default=None)
    if twice is None:
        return
    first, second = (_read_document(splits[split], ordinal, options) for split, ordinal in twice)
    known = "" if first.provenance is None else first.provenance.id
    raise InputError(
        f"{second.place}: the id {known!r} is also the id of another document, {first.place}",
        remedy="give every document its own id, or leave `id` out of the --provenance file",
    )


def _read_document(split: InputSplit, number: int, options: BuildOptions) -> TextRecord:
    """Read a split up to its document `number`, counted without blank ones; return this document."""
    if split.streamed_piece is not None:
        split = InputSplit((PieceReader().read(split.streamed_piece, options),))
    documents = (document for document in read_documents(split, options) if not document.is_blank)
    return next(document for ordinal, document in enumerate(documents) if ordinal == number)
