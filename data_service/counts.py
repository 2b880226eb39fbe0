"""The counting pass: how many rows each block is cut into, known before any sample is needed.

Contiguous packing needs arithmetic only. Where sentence boundaries decide, every block is looked at once per
corpus, packing and length, and the counts are kept under a key that names just those.
"""

import hashlib
import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from data_service.corpora import Corpora
from data_service.samples.make import cut
from data_service.samples.packing import contiguous_rows
from data_service.spec import StreamSpec
from data_service.store.base import Store
from data_service.store.errors import KeyMissing

RowCounts = NDArray[np.int64]
"""[B] int64, rows of each block of a source."""

CountBlocks = Callable[[StreamSpec, int, int], RowCounts]
"""(spec, source, number of blocks) -> the counts, by whatever means."""


def count_range(corpora: Corpora, source: int, start: int, stop: int) -> RowCounts:
    """[stop - start] int64, rows of blocks `start` to `stop`."""
    blocks = (corpora.read(source, block) for block in range(start, stop))
    return np.array([len(cut(block, corpora.spec)) for block in blocks], dtype=np.int64)


def count_rows(
    corpora: Corpora, cache: Store | None, count: CountBlocks | None = None
) -> tuple[RowCounts, ...]:
    """The row counts of every source.

    Args:
        corpora: what to count.
        cache: where counts are kept between runs; None to count anew.
        count: counts one source's blocks; in this process if None.
    """
    return tuple(_source_counts(corpora, source, cache, count) for source in range(len(corpora.tables)))


def _source_counts(
    corpora: Corpora, source: int, cache: Store | None, count: CountBlocks | None
) -> RowCounts:
    spec, table = corpora.spec, corpora.tables[source]
    if spec.packing == "contiguous":
        return contiguous_rows(table.tokens, table.documents, spec.length)
    key = f"rows/{_counts_key(spec, source)}.npy"
    kept = None if cache is None else _load(cache, key)
    if kept is not None and len(kept) == len(table):
        return kept
    counted = (
        count_range(corpora, source, 0, len(table)) if count is None else count(spec, source, len(table))
    )
    if cache is not None:
        _save(cache, key, counted)
    return counted


def _counts_key(spec: StreamSpec, source: int) -> str:
    parts = (spec.sources[source].manifest_fingerprint, spec.split, spec.packing, spec.length)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _load(cache: Store, key: str) -> RowCounts | None:
    try:
        data = cache.get(key)
    except KeyMissing:
        return None
    counts: RowCounts = np.load(io.BytesIO(data), allow_pickle=False)
    return counts


def _save(cache: Store, key: str, counts: RowCounts) -> None:
    buffer = io.BytesIO()
    np.save(buffer, counts, allow_pickle=False)
    cache.put(key, buffer.getvalue())
