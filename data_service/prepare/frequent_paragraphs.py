"""Finds the paragraphs that many documents have, over all chunks, one range of hashes at a time so that memory is
bounded.

Each chunk leaves the hashes of its paragraphs and how many of its documents have each (`paragraphs.py`). A task adds up
one range of all chunks, and writes for each chunk which of its hashes are frequent: so the next pass over a chunk loads
no more hashes than the chunk has. Sums depend neither on the order of tasks nor on who computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.ingest.tasks import TaskReceipt, hash_strings, put_unless_empty
from data_service.prepare.documents import parquet_bytes
from data_service.prepare.layout import ComparingTask, PrepareLayout
from data_service.prepare.paragraphs import (
    INDEX_BITS,
    PARAGRAPH_RECORD_DTYPE,
    DuplicateParagraphs,
    HashedParagraphs,
    ListedParagraph,
    ParagraphCuts,
)
from data_service.store.base import Store, digest, parallel_map

_PARTITION_RECORDS = 4_000_000  # records; about 200 MB while they are added up
_TABLE_SCHEMA = pa.schema(
    [
        pa.field("paragraph", pa.string(), nullable=False),
        pa.field("documents", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class CountParagraphsTask(ComparingTask):
    """The task of adding up one range of hashes. `bits`: their first bits [first, stop)."""

    chunks: tuple[HashedParagraphs, ...]
    bits: tuple[int, int]
    settings: DuplicateParagraphs

    stage: ClassVar[str] = "count"

    @property
    def input_bytes(self) -> int:
        records = sum(chunk.records for chunk in self.chunks)
        return (records * PARAGRAPH_RECORD_DTYPE.itemsize * (self.bits[1] - self.bits[0])) >> INDEX_BITS


class CountParagraphsReceipt(TaskReceipt):
    """The result of adding up a range.

    Attributes:
        starts: [chunks + 1], byte at which the frequent hashes of each chunk begin in the stored object, and the end.
        digest: digest of the object.
        frequent: number of different frequent paragraphs.
        first: (hash, number of documents, first chunk that has it) of the most frequent ones, as many as are listed.
    """

    starts: list[int]
    digest: str
    frequent: int
    first: list[tuple[int, int, int]]


def plan_count_tasks(
    layout: PrepareLayout, kind: str, stage: DuplicateParagraphs, chunks: Sequence[HashedParagraphs]
) -> list[CountParagraphsTask]:
    """Cut the hashes into ranges of about `_PARTITION_RECORDS` records."""
    source = hash_strings(chunk.digest for chunk in chunks)
    count = min(1 << INDEX_BITS, max(1, -(-sum(chunk.records for chunk in chunks) // _PARTITION_RECORDS)))
    edges = [(number << INDEX_BITS) // count for number in range(count + 1)]
    return [
        CountParagraphsTask(layout, index, source, kind, tuple(chunks), bits, stage)
        for index, bits in enumerate(pairwise(edges))
    ]


def count_paragraph_range(task: CountParagraphsTask, store: Store) -> CountParagraphsReceipt:
    """Write which paragraphs of each chunk are frequent; return the receipt."""
    parts = list(parallel_map(partial(_read_hash_range, store, task.bits), task.chunks))
    records = np.concatenate([np.empty(0, dtype=PARAGRAPH_RECORD_DTYPE), *parts])
    chunk = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    # A stable sort keeps the records of one hash in the order of chunks.
    order = np.argsort(records["key"], kind="stable")
    keys = records["key"][order]
    begins = np.flatnonzero(np.append(np.ones(min(1, len(keys)), dtype=np.bool_), keys[1:] != keys[:-1]))
    sums = np.add.reduceat(records["documents"][order].astype(np.int64), begins) if len(begins) else begins
    frequent = sums > task.settings.most_documents
    rows = order[np.repeat(frequent, np.diff(np.append(begins, len(keys))))]
    rows = rows[np.argsort(chunk[rows], kind="stable")]
    data = records["key"][rows].astype("<u8").tobytes()
    starts = 8 * np.searchsorted(chunk[rows], np.arange(len(parts) + 1))
    return CountParagraphsReceipt(
        source=task.source,
        files=put_unless_empty(store, task.layout.frequent_paragraphs_key(task.kind, task.index), data),
        starts=starts.tolist(),
        digest=digest(data),
        frequent=int(frequent.sum()),
        first=_most_frequent_paragraphs(
            keys[begins[frequent]], sums[frequent], chunk[order[begins[frequent]]], task.settings.listed
        ),
    )


def _most_frequent_paragraphs(
    keys: NDArray[np.uint64], documents: NDArray[np.int64], chunks: NDArray[np.uint32], count: int
) -> list[tuple[int, int, int]]:
    chosen = np.lexsort((keys, -documents))[:count]
    return list(zip(keys[chosen].tolist(), documents[chosen].tolist(), chunks[chosen].tolist(), strict=True))


def _read_hash_range(store: Store, bits: tuple[int, int], chunk: HashedParagraphs) -> NDArray[np.void]:
    return chunk.read_records(store, *bits)


def plan_paragraph_cuts(task: CountParagraphsTask, counted: Sequence[CountParagraphsReceipt]) -> list[ParagraphCuts]:
    """Return, for each chunk, the paragraphs to cut from its documents. `task`: a task of any receipt."""
    every = sorted((-documents, key, chunk) for each in counted for key, documents, chunk in each.first)
    listed: list[list[tuple[int, int]]] = [[] for _ in task.chunks]
    for documents, key, chunk in every[: task.settings.listed]:
        listed[chunk].append((key, -documents))
    total = hash_strings(each.digest for each in counted)
    return [
        ParagraphCuts(
            task.settings,
            tuple(
                (task.layout.frequent_paragraphs_key(task.kind, index), each.starts[chunk], length)
                for index, each in enumerate(counted)
                if (length := each.starts[chunk + 1] - each.starts[chunk])
            ),
            tuple(listed[chunk]),
            hash_strings([total, str(listed[chunk])]),
        )
        for chunk in range(len(task.chunks))
    ]


def encode_paragraph_table(listed: Sequence[ListedParagraph]) -> bytes:
    """Return the table of the most frequent paragraphs as Parquet, the most frequent first."""
    ordered = sorted(listed, key=lambda each: (-each.documents, each.paragraph))
    return parquet_bytes(pa.Table.from_pylist([each.model_dump() for each in ordered], schema=_TABLE_SCHEMA))
