"""The counting pass, which finds how many rows each block of a corpus is cut into before any sample is needed.

Contiguous packing, lanes and pairs need arithmetic only. If sentence boundaries or random draws decide where rows are
cut, every block is read once for each corpus, input settings and row length, and the counts are cached (`_cache_key`).
If batches are measured in tokens, the length of every row is cached in the same way.

A pass over a large corpus takes hours, so its results are stored piece by piece, and it continues after a restart.

If blocks can be cut in K ways (`RowInput.cut_count`), each block has K entries, one for each way of cutting it.
"""

import hashlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BlockTable
from data_service.samples.lanes import Lanes, count_lane_rows
from data_service.samples.make import CutRows, cut_block, cutting_key
from data_service.samples.packing import PackedInput, count_contiguous_rows
from data_service.samples.pairs import RandomlyCutRows, Translations
from data_service.samples.spec import StreamSpec
from data_service.samples.texts import TextPairs
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.stream.sources import Corpora

RowCounts = NDArray[np.int64]
"""[B * K] int64, number of rows of each entry of a source. Entry b * K + k is block b, cut in the k-th way."""

RowLengths = NDArray[np.uint32]
"""[N] uint32, number of tokens, special ones included, of each row of a source, entry after entry."""

PassResult: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]
"""The result of a pass: row counts or row lengths."""

CountingPass = Callable[[Corpora, int, int, int], PassResult]
"""(corpora, source, start, stop) -> the result for these blocks: `count_rows_in_blocks` or `measure_rows_in_blocks`."""

ReportCountedBlocks = Callable[[int], None]
"""A function that is called with the number of blocks that have just been done."""

PassRunner = Callable[[CountingPass, Corpora, int, range, ReportCountedBlocks], PassResult]
"""A function that runs a pass over some blocks of a source, in this process or on Ray."""

_log = logging.getLogger(__name__)
_BLOCKS_PER_PIECE = 2048  # blocks whose results are stored in one object; counting them takes minutes
_DIGEST_BYTES = 32  # bytes of a sha256


def count_rows_in_blocks(corpora: Corpora, source: int, start: int, stop: int) -> RowCounts:
    """Return [(stop - start) * K] int64, `RowCounts` of blocks `start` to `stop`."""
    return np.array([len(rows) for rows in _rows_of_blocks(corpora, source, start, stop)], dtype=np.int64)


def measure_rows_in_blocks(corpora: Corpora, source: int, start: int, stop: int) -> RowLengths:
    """Return [N] uint32, `RowLengths` of blocks `start` to `stop`."""
    lengths = [rows.row_lengths.astype(np.uint32) for rows in _rows_of_blocks(corpora, source, start, stop)]
    return np.concatenate([np.zeros(0, dtype=np.uint32), *lengths])


def _rows_of_blocks(corpora: Corpora, source: int, start: int, stop: int) -> Iterator[CutRows]:
    """Yield the rows of each block from `start` to `stop`, once for every way of cutting it."""
    spec = corpora.spec
    for number in range(start, stop):
        block = corpora.read_source_block(source, number)
        for structure in range(spec.input.cut_count):
            yield cut_block(block, spec, cutting_key(spec, source, number, structure), source)


def run_in_process(
    job: CountingPass, corpora: Corpora, source: int, blocks: range, counted: ReportCountedBlocks
) -> PassResult:
    """Run a pass in this process, as a `PassRunner`."""
    found = job(corpora, source, blocks.start, blocks.stop)
    counted(len(blocks))
    return found


@dataclass(frozen=True)
class RowCounter:
    """Counts and measures rows. Results are cached: first for ranges of a source's blocks, then for the whole source.

    Attributes:
        cache: store that keeps results between runs; None to count again.
        run: function that runs a pass over a source's blocks.
        report_counted: function that is called with the number of blocks just done, also if their results were cached.
    """

    cache: Store | None = None
    run: PassRunner = run_in_process
    report_counted: ReportCountedBlocks = lambda blocks: None

    def count_rows(self, corpora: Corpora) -> tuple[RowCounts, ...]:
        """Return the row counts of every source."""
        found: list[RowCounts] = []
        for source, table in enumerate(corpora.tables):
            counts = _counts_from_manifest(corpora.spec, source, table)
            if counts is None:
                counts = self._run_pass("rows", count_rows_in_blocks, corpora, source).astype(np.int64, copy=False)
            found.append(counts)
        return tuple(found)

    def measure_rows(self, corpora: Corpora) -> tuple[RowLengths, ...]:
        """Return the row lengths of every source."""
        found = [self._run_pass("lengths", measure_rows_in_blocks, corpora, n) for n in range(len(corpora.tables))]
        return tuple(lengths.astype(np.uint32, copy=False) for lengths in found)

    def _run_pass(self, kind: str, job: CountingPass, corpora: Corpora, source: int) -> PassResult:
        """Return the result of a pass over a source. `kind`: folder of the cache for passes of this kind."""
        name = f"{kind}/{_cache_key(corpora.spec, source)}"
        blocks = len(corpora.tables[source])
        kept = self._load_result(f"{name}.npy")
        if kept is not None:
            self.report_counted(blocks)
            return kept
        starts = range(0, blocks, _BLOCKS_PER_PIECE)
        pieces = {f"{name}/{start}.npy": range(start, min(start + _BLOCKS_PER_PIECE, blocks)) for start in starts}
        found = [self._run_block_range(key, job, corpora, source, piece) for key, piece in pieces.items()]
        whole: PassResult = np.concatenate([job(corpora, source, 0, 0), *found])
        self._store_result(f"{name}.npy", whole)
        if self.cache is not None:
            for key in pieces:
                self.cache.delete(key)
        return whole

    def _run_block_range(self, key: str, job: CountingPass, corpora: Corpora, source: int, blocks: range) -> PassResult:
        """Return the result for some blocks of a source, from the cache if it is there."""
        kept = self._load_result(key)
        if kept is not None:
            self.report_counted(len(blocks))
            return kept
        found = self.run(job, corpora, source, blocks, self.report_counted)
        self._store_result(key, found)
        return found

    def _load_result(self, key: str) -> PassResult | None:
        """Return the result cached under `key`; None if there is none, or if it does not match its hash."""
        if self.cache is None:
            return None
        try:
            data = memoryview(self.cache.get(key))
        except KeyMissing:
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            _log.warning(
                "the cached row counts or lengths in %s are damaged or have no hash, so they are computed again",
                self.cache.with_prefix(key).uri,
            )
            return None
        found: PassResult = np.load(io.BytesIO(body), allow_pickle=False)
        return found

    def _store_result(self, key: str, found: PassResult) -> None:
        """Cache a result, followed by its sha256."""
        if self.cache is not None:
            buffer = io.BytesIO()
            np.save(buffer, found, allow_pickle=False)
            buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
            self.cache.put(key, buffer.getvalue())


def _counts_from_manifest(spec: StreamSpec, source: int, table: BlockTable) -> RowCounts | None:
    """Return a source's row counts if its manifest is enough to compute them; None if its blocks must be read."""
    match spec.input_for_source(source):
        case PackedInput(packing="contiguous"):
            return count_contiguous_rows(table.tokens, table.documents, spec.length)
        case TextPairs() | Translations():
            return table.documents
        case Lanes() as lanes:
            return count_lane_rows(table.tokens, table.documents, lanes, spec.length)
        case _:
            return None


def _cache_key(spec: StreamSpec, source: int) -> str:
    """Return the cache key of a source's counts, a hash of everything on which its rows depend."""
    fingerprint = spec.sources[source].manifest_fingerprint
    cut_so = spec.input_for_source(source)
    parts: tuple[str | int, ...] = (fingerprint, spec.split, cut_so.model_dump_json(), spec.length)
    if isinstance(cut_so, RandomlyCutRows):
        parts += (spec.seed,)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
