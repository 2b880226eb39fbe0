"""Finds paragraphs that are in many documents of all chunks, one range of hashes at a time so that memory is bounded.

For each chunk a pass has stored the hashes of its paragraphs, each with the number of documents that have it
(`paragraphs.py`). A task adds up these numbers for one range of hashes, and writes for each chunk which of its hashes
are frequent. The next pass loads only these. The result does not depend on the order of tasks or the number of workers.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_service.ingest.deduplicate import partition_ranges
from data_service.ingest.tasks import hash_strings, put_unless_empty
from data_service.prepare.layout import (
    BUCKET_COUNT,
    BucketsTask,
    ByChunkReceipt,
    PrepareLayout,
    StoredRecords,
    locate_chunk_parts,
)
from data_service.prepare.paragraphs import PARAGRAPH_RECORD_DTYPE, DuplicateParagraphs, ListedParagraph, ParagraphCuts
from data_service.store.base import Store, digest

_PARTITION_RECORDS = 4_000_000  # records per task: about 200 MB of memory
_TABLE_SCHEMA = pa.schema(  # the table of the most frequent paragraphs
    [
        pa.field("paragraph", pa.string(), nullable=False),
        pa.field("documents", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class CountParagraphsTask(BucketsTask):
    """The task of counting the documents that have each paragraph, for one range of hashes."""

    settings: DuplicateParagraphs

    stage: ClassVar[str] = "count"
    dtype: ClassVar[np.dtype[np.void]] = PARAGRAPH_RECORD_DTYPE


class CountParagraphsReceipt(ByChunkReceipt):
    """The result of a count task: the frequent hashes of each chunk. `first`: (hash, number of documents, first chunk
    with it) of the most frequent ones, at most `settings.listed`."""

    first: list[tuple[int, int, int]]


def plan_count_tasks(
    layout: PrepareLayout, kind: str, stage: DuplicateParagraphs, chunks: Sequence[StoredRecords]
) -> list[CountParagraphsTask]:
    """Return one task for each range of hashes, of about `_PARTITION_RECORDS` records."""
    source, records = hash_strings(chunk.digest for chunk in chunks), sum(chunk.records for chunk in chunks)
    return [
        CountParagraphsTask(layout, index, source, kind, tuple(chunks), buckets, stage)
        for index, buckets in enumerate(partition_ranges(records, _PARTITION_RECORDS, BUCKET_COUNT))
    ]


def count_paragraph_range(task: CountParagraphsTask, store: Store) -> CountParagraphsReceipt:
    """Write the hashes of the frequent paragraphs of each chunk; return the receipt."""
    parts = task.read_chunks(store)
    records = np.concatenate(parts)
    chunk = np.repeat(np.arange(len(parts), dtype=np.uint32), [len(part) for part in parts])
    # `first` is the index of a key's first record, which comes from the first chunk that has the key.
    keys, first, number = np.unique(records["key"], return_index=True, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, number, records["documents"])
    frequent = sums > task.settings.most_documents
    rows = np.flatnonzero(frequent[number])
    data = records["key"][rows].astype("<u8").tobytes()
    # The most frequent are listed; among equal counts the lower hash comes first.
    listed = np.flatnonzero(frequent)
    listed = listed[np.argsort(-sums[listed], kind="stable")][: task.settings.listed]
    columns = (keys[listed], sums[listed], chunk[first[listed]])
    return CountParagraphsReceipt(
        source=task.source,
        files=put_unless_empty(store, task.output_key(), data),
        starts=(8 * np.searchsorted(chunk[rows], np.arange(len(parts) + 1))).tolist(),
        digest=digest(data),
        first=list(zip(*(column.tolist() for column in columns), strict=True)),
    )


def plan_paragraph_cuts(task: CountParagraphsTask, counted: Sequence[CountParagraphsReceipt]) -> list[ParagraphCuts]:
    """Return, for each chunk, the paragraphs to cut from its documents. `task`: any of the count tasks."""
    every = sorted((-documents, key, chunk) for each in counted for key, documents, chunk in each.first)
    listed: list[list[tuple[int, int]]] = [[] for _ in task.chunks]
    for documents, key, chunk in every[: task.settings.listed]:
        listed[chunk].append((key, -documents))
    total = hash_strings(each.digest for each in counted)
    return [
        ParagraphCuts(
            task.settings,
            locate_chunk_parts(chunk, counted),
            tuple(listed[chunk]),
            hash_strings([total, str(listed[chunk])]),
        )
        for chunk in range(len(task.chunks))
    ]


def encode_paragraph_table(listed: Sequence[ListedParagraph]) -> bytes:
    """Return the table of the most frequent paragraphs as Parquet, the most frequent first."""
    ordered = sorted(listed, key=lambda each: (-each.documents, each.paragraph))
    file = io.BytesIO()
    table = pa.Table.from_pylist([each.model_dump() for each in ordered], schema=_TABLE_SCHEMA)
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()
