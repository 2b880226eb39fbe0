"""The counting pass: how many rows each block is cut into, known before any sample is needed.

Contiguous packing and lanes need arithmetic only. Where sentence boundaries or draws decide, every block is looked
at once per corpus, input and length, and the counts are kept under a key that names just those. Where batches are
measured in tokens, the length of every row is kept likewise.

A corpus that is cut in several ways (`Input.structures`, K of them) has K entries for each block, block after block.
"""

import hashlib
import io
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_service.corpora import Corpora
from data_service.samples.inputs import Drawn, Lanes, Packed
from data_service.samples.lanes import LaneRows, count_lane_rows
from data_service.samples.make import cut, structure_key
from data_service.samples.packing import Rows, contiguous_rows
from data_service.spec import StreamSpec
from data_service.store.base import Store
from data_service.store.errors import KeyMissing

RowCounts = NDArray[np.int64]
"""[B * K] int64, rows of each entry of a source: entry b * K + k is block b, cut in way k."""

RowLengths = NDArray[np.uint32]
"""[N] uint32, tokens of each row of a source as the model sees it, entry after entry."""

Found: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]
"""What a pass finds: row counts, or row lengths."""

Pass = Callable[[Corpora, int, int, int], Found]
"""(corpora, source, first block, last block) -> what is known of these blocks. `count_range` or `measure_range`."""

Runner = Callable[[Pass, Corpora, int, int], Found]
"""Runs a pass over blocks 0 to n of a source, by whatever means: (pass, corpora, source, n)."""


def count_range(corpora: Corpora, source: int, start: int, stop: int) -> RowCounts:
    """[(stop - start) * K] int64, rows of blocks `start` to `stop`."""
    return np.array([len(rows) for rows in _cut_range(corpora, source, start, stop)], dtype=np.int64)


def measure_range(corpora: Corpora, source: int, start: int, stop: int) -> RowLengths:
    """[N] uint32, tokens of the rows of blocks `start` to `stop`."""
    lengths = [rows.lengths.astype(np.uint32) for rows in _cut_range(corpora, source, start, stop)]
    return np.concatenate([np.zeros(0, dtype=np.uint32), *lengths])


def _cut_range(corpora: Corpora, source: int, start: int, stop: int) -> Iterator[Rows | LaneRows]:
    """The rows of blocks `start` to `stop`, in every way in which each is cut."""
    spec = corpora.spec
    for number in range(start, stop):
        block = corpora.read(source, number)
        for structure in range(spec.input.structures):
            yield cut(block, spec, structure_key(spec, source, number, structure))


def run_here(job: Pass, corpora: Corpora, source: int, blocks: int) -> Found:
    """The runner that uses this process."""
    return job(corpora, source, 0, blocks)


def count_rows(corpora: Corpora, cache: Store | None, run: Runner = run_here) -> tuple[RowCounts, ...]:
    """The row counts of every source.

    Args:
        corpora: what to count.
        cache: where counts are kept between runs; None to count anew.
        run: how a source's blocks are gone through.
    """
    spec = corpora.spec
    if isinstance(spec.input, Packed) and spec.input.packing == "contiguous":
        return tuple(contiguous_rows(table.tokens, table.documents, spec.length) for table in corpora.tables)
    if isinstance(spec.input, Lanes):
        lanes = spec.input
        return tuple(
            count_lane_rows(table.tokens, table.documents, lanes, spec.length) for table in corpora.tables
        )
    found = [_kept(corpora, source, cache, "rows", count_range, run) for source in range(len(corpora.tables))]
    return tuple(counts.astype(np.int64, copy=False) for counts in found)


def measure_rows(corpora: Corpora, cache: Store | None, run: Runner = run_here) -> tuple[RowLengths, ...]:
    """The row lengths of every source; arguments as for `count_rows`."""
    found = [
        _kept(corpora, source, cache, "lengths", measure_range, run) for source in range(len(corpora.tables))
    ]
    return tuple(lengths.astype(np.uint32, copy=False) for lengths in found)


def _kept(corpora: Corpora, source: int, cache: Store | None, kind: str, job: Pass, run: Runner) -> Found:
    key = f"{kind}/{_name(corpora.spec, source)}.npy"
    kept = None if cache is None else _load(cache, key)
    if kept is not None:
        return kept
    found = run(job, corpora, source, len(corpora.tables[source]))
    if cache is not None:
        buffer = io.BytesIO()
        np.save(buffer, found, allow_pickle=False)
        cache.put(key, buffer.getvalue())
    return found


def _name(spec: StreamSpec, source: int) -> str:
    """What rows depend on, and nothing else."""
    fingerprint = spec.sources[source].manifest_fingerprint
    parts: tuple[str | int, ...] = (fingerprint, spec.split, spec.input.model_dump_json(), spec.length)
    if isinstance(spec.input, Drawn):
        parts += (spec.seed,)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _load(cache: Store, key: str) -> Found | None:
    try:
        data = cache.get(key)
    except KeyMissing:
        return None
    found: Found = np.load(io.BytesIO(data), allow_pickle=False)
    return found
