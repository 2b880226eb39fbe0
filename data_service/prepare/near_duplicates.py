"""Finds pairs of near duplicates over all chunks. Candidates have an equal band (`minhash.py`); a task compares one
range of the hashes of one band.

In a group of documents with the same band, every document is compared with the first by their sketches. Similar
documents are paired with the first; the others form a new group, up to `_MAX_GROUPING_ROUNDS` times. So the work is
linear in the number of documents, even if all share a band. The first document is the first by chunk, then by position
in the chunk, so the pairs do not depend on the order of tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.deduplicate import partition_ranges
from data_service.ingest.tasks import TaskReceipt, hash_strings, put_unless_empty
from data_service.prepare.layout import BUCKET_COUNT, BucketsTask, PrepareLayout
from data_service.prepare.minhash import HASH_COUNT, BandSettings
from data_service.prepare.signatures import BAND_RECORD_DTYPE, ChunkSignatures
from data_service.store.base import Store, digest

_PARTITION_DOCUMENTS = 2_000_000  # documents per task: about 300 MB of memory
_MAX_GROUPING_ROUNDS = 16  # rounds of forming new groups from dissimilar documents
NumberDtype = np.dtype[np.unsignedinteger[Any]]  # a NumPy type for document numbers


@dataclass(frozen=True)
class DocumentSignatures:
    """The signatures of all chunks. Documents are numbered consecutively over all chunks.

    Attributes:
        chunks: signatures of each chunk.
        bands: how signatures are cut into bands.
        digest: hash of all signatures and of the bands.
    """

    chunks: tuple[ChunkSignatures, ...]
    bands: BandSettings
    digest: str

    @property
    def chunk_starts(self) -> list[int]:
        """[chunks + 1]: the number of each chunk's first document, and the total of documents."""
        return [0, *accumulate(chunk.documents for chunk in self.chunks)]

    @property
    def dtype(self) -> NumberDtype:
        """The NumPy type that holds document numbers."""
        return np.dtype("<u4" if self.chunk_starts[-1] < 2**32 else "<u8")


@dataclass(frozen=True)
class MatchBandsTask(BucketsTask):
    """The task of finding pairs in one range of hashes of one band."""

    signed: DocumentSignatures
    band: int

    stage: ClassVar[str] = "join"
    dtype: ClassVar[np.dtype[np.void]] = BAND_RECORD_DTYPE


class MatchBandsReceipt(TaskReceipt):
    """The result of a task that finds pairs. `digest`: digest of the pairs."""

    digest: str


def plan_band_tasks(
    layout: PrepareLayout, kind: str, chunks: Sequence[ChunkSignatures], bands: BandSettings
) -> list[MatchBandsTask]:
    """Return one task for each range of each band's hashes, of about `_PARTITION_DOCUMENTS` documents."""
    signed = DocumentSignatures(tuple(chunks), bands, hash_strings([str(bands), *(one.digest for one in chunks)]))
    ranges = partition_ranges(sum(chunk.records for chunk in chunks), _PARTITION_DOCUMENTS, BUCKET_COUNT)
    return [
        MatchBandsTask(layout, index, signed.digest, kind, signed.chunks, buckets, signed, band)
        for index, (band, buckets) in enumerate((band, buckets) for band in range(bands.count) for buckets in ranges)
    ]


def match_band_range(task: MatchBandsTask, store: Store) -> MatchBandsReceipt:
    """Write pairs [P, 2] of document numbers, the first of a group and a similar document; return the receipt."""
    signed = task.signed
    read = task.read_chunks(store, task.band, signed.bands.count)
    records = np.concatenate(read)
    starts = np.array(signed.chunk_starts[:-1], dtype=np.int64)
    numbers = np.repeat(starts, [len(part) for part in read]) + records["ordinal"]
    order = np.lexsort((numbers, records["key"]))
    pairs = find_pairs(
        records["key"][order], numbers[order], records["sketch"][order], signed.bands.least_equal
    ).astype(signed.dtype)
    data = pairs.tobytes()
    files = put_unless_empty(store, task.output_key(), data)
    return MatchBandsReceipt(source=task.source, files=files, digest=digest(data))


def find_pairs(
    keys: NDArray[np.uint64], numbers: NDArray[np.int64], sketches: NDArray[np.uint8], min_equal_bits: int
) -> NDArray[np.int64]:
    """Return [P, 2] pairs of documents with equal keys whose sketches have at least `min_equal_bits` equal bits.

    Args:
        keys: [N] the documents' hashes of one band, sorted.
        numbers: [N] numbers of the documents, ascending within a key.
        sketches: [N, SKETCH_BYTES] sketches of the documents.
    """
    found = [np.empty((0, 2), dtype=np.int64)]
    rows = np.arange(len(keys))
    for _ in range(_MAX_GROUPING_ROUNDS):
        begins = np.append(np.ones(min(1, len(rows)), dtype=np.bool_), keys[rows][1:] != keys[rows][:-1])
        sizes = np.diff(np.append(np.flatnonzero(begins), len(rows)))
        several = np.repeat(sizes > 1, sizes)
        rows, firsts = rows[several], np.repeat(rows[begins], sizes)[several]
        if not len(rows):
            break
        unequal = np.bitwise_count(sketches[rows] ^ sketches[firsts]).sum(axis=1, dtype=np.int64)
        similar = HASH_COUNT - unequal >= min_equal_bits
        linked = similar & (rows != firsts)
        found.append(np.stack((numbers[firsts[linked]], numbers[rows[linked]]), axis=1))
        rows = rows[~similar]
    return np.concatenate(found)
