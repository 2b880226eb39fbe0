"""The keys of a preparation's results and, below `build/`, of its temporary objects; also the common base of the tasks
that compare documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BUILD_FOLDER, BuildLayout
from data_service.ingest.file_kinds import PREPARED_DOCUMENTS_PREFIX
from data_service.ingest.tasks import BuildTask, TaskReceipt
from data_service.store.base import Store, parallel_map

_BUCKET_BITS = 12  # leading bits of a hash that are the number of its bucket
BUCKET_COUNT = 1 << _BUCKET_BITS  # number of buckets: equal ranges of hashes
_START_DTYPE = np.dtype("<u4")  # an index in the result of `bucket_starts`
STARTS_BYTES = (BUCKET_COUNT + 1) * _START_DTYPE.itemsize  # size of the result of `bucket_starts`
DROPPED_PREFIX, PARAGRAPHS_PREFIX = "dropped/", "paragraphs/"  # folders of the output


@dataclass(frozen=True)
class PrepareLayout(BuildLayout):
    """The keys that the tasks of one preparation read and write. Passes are numbered from 0 (see `passes.py`)."""

    def kept_key(self, chunk: int) -> str:
        """Return the key in the output of those documents of a chunk that the last pass kept."""
        return f"{PREPARED_DOCUMENTS_PREFIX}{chunk:06d}.parquet"

    def dropped_key(self, chunk: int, pass_number: int) -> str:
        """Return the key of a chunk's documents that pass `pass_number` dropped."""
        return f"{DROPPED_PREFIX}{chunk:06d}-{pass_number}.parquet"

    def between_passes_key(self, chunk: int, pass_number: int) -> str:
        """Return the key of a chunk's documents that pass `pass_number` kept for the next pass."""
        return f"{BUILD_FOLDER}{self.build}/documents/{pass_number}/{chunk:06d}.parquet"

    def hashes_of_kind_key(self, kind: str, chunk: int) -> str:
        """Return the key of a chunk's sorted hashes. `kind`: `ids`, or `texts-N` for the texts that pass N kept."""
        return f"{BUILD_FOLDER}{self.build}/hashed/{kind}/{chunk:06d}.bin"

    def listed_paragraphs_key(self, pass_number: int) -> str:
        """Return the key of the table of the most frequent paragraphs that were cut before pass `pass_number`."""
        return f"{PARAGRAPHS_PREFIX}{pass_number}.parquet"


@dataclass(frozen=True)
class ComparingTask(BuildTask):
    """A task that compares documents of all chunks. `kind`: kind of hashes, as in `hashes_of_kind_key`."""

    layout: PrepareLayout
    kind: str

    @property
    def receipt_key(self) -> str:
        return self.layout.receipt_key(f"{self.stage}-{self.kind}", self.index)

    def output_key(self, part: int = 0) -> str:
        """Return the key of one object of the task's result."""
        return f"{BUILD_FOLDER}{self.layout.build}/{self.stage}-{self.kind}/{self.index:06d}-{part:06d}.bin"


@dataclass(frozen=True)
class StoredRecords:
    """A stored object with the hashes of a chunk to compare: tables of records, sorted by a 64-bit hash.

    All tables have the same number of records. The object starts with the `bucket_starts` of each table.

    Attributes:
        key: key of the object.
        digest: digest of its bytes.
        size: number of bytes; 0 if there is no object.
        records: number of records in each table.
    """

    key: str
    digest: str
    size: int
    records: int

    def object_sizes(self) -> dict[str, int]:
        """Return {key: size} of the object; an empty dict if there is no object."""
        return {self.key: self.size} if self.size else {}

    def read_records(
        self, store: Store, dtype: np.dtype[np.void], buckets: tuple[int, int], table: int = 0, tables: int = 1
    ) -> NDArray[np.void]:
        """Return the records of table number `table` (of `tables`) whose hashes are in `buckets` [first, stop)."""
        first, stop = buckets
        begin = end = 0
        if self.records:
            place, length = table * STARTS_BYTES + first * _START_DTYPE.itemsize, stop - first + 1
            starts = np.frombuffer(store.get_range(self.key, place, length * _START_DTYPE.itemsize), _START_DTYPE)
            begin, end = int(starts[0]), int(starts[-1])
        if begin == end:
            return np.empty(0, dtype)
        place = tables * STARTS_BYTES + (table * self.records + begin) * dtype.itemsize
        return np.frombuffer(store.get_range(self.key, place, (end - begin) * dtype.itemsize), dtype)


def bucket_starts(hashes: NDArray[np.uint64]) -> bytes:
    """Return the bytes of [BUCKET_COUNT + 1] uint32: the index of each bucket's first hash in the sorted `hashes`, and
    their number. The leading bits of a hash are its bucket."""
    edges = np.arange(1, BUCKET_COUNT, dtype=np.uint64) << np.uint64(64 - _BUCKET_BITS)
    return np.array([0, *np.searchsorted(hashes, edges).tolist(), len(hashes)], dtype=_START_DTYPE).tobytes()


@dataclass(frozen=True)
class BucketsTask(ComparingTask):
    """A task that compares those records of all chunks whose hashes are in the range [first, stop) of buckets. `dtype`:
    type of the records."""

    chunks: tuple[StoredRecords, ...]
    buckets: tuple[int, int]

    dtype: ClassVar[np.dtype[np.void]]

    @property
    def input_bytes(self) -> int:
        first, stop = self.buckets
        return sum(chunk.records for chunk in self.chunks) * self.dtype.itemsize * (stop - first) // BUCKET_COUNT

    def read_chunks(self, store: Store, table: int = 0, tables: int = 1) -> list[NDArray[np.void]]:
        """Return each chunk's records in the task's range of buckets. Arguments as for `StoredRecords.read_records`."""

        def read(chunk: StoredRecords) -> NDArray[np.void]:
            return chunk.read_records(store, self.dtype, self.buckets, table, tables)

        return list(parallel_map(read, self.chunks))


class ByChunkReceipt(TaskReceipt):
    """The result of a task that writes one object with a byte range for each chunk.

    Attributes:
        starts: [chunks + 1] byte offsets of the chunks' ranges in the object, and its size.
        digest: digest of the object.
    """

    starts: list[int]
    digest: str


def locate_chunk_parts(chunk: int, receipts: Sequence[ByChunkReceipt]) -> tuple[tuple[str, int, int], ...]:
    """Return (key, start, length) of a chunk's byte ranges in the objects of all receipts, without empty ranges."""
    return tuple(
        (key, receipt.starts[chunk], length)
        for receipt in receipts
        for key in receipt.files
        if (length := receipt.starts[chunk + 1] - receipt.starts[chunk])
    )
