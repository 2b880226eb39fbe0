"""A stream measured in tokens, for batches of so many tokens (RoBERTa's DOC-SENTENCES).

A step takes the samples that begin within its stretch of the stream, so its rows are a function of its position
and never of the steps before. Counting uses the same arithmetic as the plan: tokens up to a row of a source's
line are prefix sums over its blocks, tokens up to a window are the sum over the sources, and within a window the
lengths of its rows decide.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from data_service.errors import CorpusError
from data_service.recent import RecentResults
from data_service.stream.counts import RowCounts, RowLengths
from data_service.stream.plan import StreamPlan

_WINDOWS_KEPT = 4


class TokenAxis:
    """`data_service.stream.positions.Axis` in tokens, special ones included.

    Args:
        plan: of the stream.
        counts: rows of each entry of each source (see `data_service.stream.counts`).
        lengths: tokens of each row of each source.

    Raises:
        CorpusError: lengths that are not those of the plan's rows.
    """

    def __init__(
        self, plan: StreamPlan, counts: tuple[RowCounts, ...], lengths: tuple[RowLengths, ...]
    ) -> None:
        self._plan = plan
        self._lengths = tuple(_narrow(measured, plan.spec.length) for measured in lengths)
        self._first_row = tuple(np.append(0, np.cumsum(rows)) for rows in counts)
        for source, first, measured in zip(plan.spec.sources, self._first_row, lengths, strict=True):
            if first[-1] != len(measured):
                raise CorpusError(
                    f"source {source.name}: {len(measured)} row lengths are known of {first[-1]} rows",
                    remedy="the row lengths in the cache are not this corpus's: delete the cache, start again",
                )
        self._up_to = tuple(
            np.append(0, np.cumsum(_sums(measured, first)))
            for first, measured in zip(self._first_row, lengths, strict=True)
        )  # tokens before each entry of a source
        self._structures = plan.spec.input.structures
        self._readings = tuple(
            np.append(0, np.cumsum(np.diff(up_to).reshape(-1, self._structures).sum(axis=0)))
            for up_to in self._up_to
        )  # tokens before each reading of a round
        self._kept: RecentResults[tuple[int, int], NDArray[np.int64]] = RecentResults(_WINDOWS_KEPT)

    def unit(self, epoch: int, sample: int) -> int:
        """Tokens before a sample, from the start of epoch 0. One past the last sample is the next epoch's start."""
        grid = self._plan.grid
        if sample == grid.samples_per_epoch:
            return self._before(epoch + 1, 0)
        window = grid.window_of(sample)
        return self._before(epoch, window) + int(self._within(epoch, window)[sample - grid.start(window)])

    def locate(self, unit: int) -> tuple[int, int]:
        """(epoch, sample) of the first sample that begins at token `unit` or after it."""
        epoch = _last(lambda e: self._before(e, 0) <= unit)
        windows = self._plan.grid.windows
        window = _last(lambda w: w < windows and self._before(epoch, w) <= unit)
        within = self._within(epoch, window)
        sample = int(np.searchsorted(within[:-1], unit - self._before(epoch, window)))
        sample += self._plan.grid.start(window)
        return (epoch, sample) if sample < self._plan.grid.samples_per_epoch else (epoch + 1, 0)

    def _before(self, epoch: int, window: int) -> int:
        """Tokens before a window, from the start of epoch 0."""
        grid = self._plan.grid
        rows = (epoch * quota + grid.before(source, window) for source, quota in enumerate(grid.quotas))
        return sum(self._in_line(source, row) for source, row in enumerate(rows))

    def _in_line(self, source: int, row: int) -> int:
        """Tokens of the first `row` rows of a source's endless line."""
        epoch, rest = self._plan.reading(source, row)
        rounds, structure = divmod(epoch, self._structures)
        tokens = rounds * int(self._up_to[source][-1]) + int(self._readings[source][structure])
        if not rest:
            return tokens
        blocks, ends = self._plan.line(source, epoch)
        index = int(np.searchsorted(ends, rest, side="right"))
        entries = blocks * self._structures + structure
        tokens += int(np.diff(self._up_to[source])[entries[:index]].sum())
        done = int(ends[index - 1]) if index else 0
        first = int(self._first_row[source][entries[index]]) if rest > done else 0
        return tokens + int(self._lengths[source][first : first + rest - done].sum())

    def _within(self, epoch: int, window: int) -> NDArray[np.int64]:
        """[N + 1] int64, tokens before each sample of a window, and in all of it."""
        return self._kept.get((epoch, window), lambda: self._count_within(epoch, window))

    def _count_within(self, epoch: int, window: int) -> NDArray[np.int64]:
        found = self._plan.window(epoch, window)
        parts = [
            self._lengths[piece.source][first + piece.start : first + piece.stop]
            for piece in found.pieces
            for entry in (piece.block * self._structures + piece.epoch % self._structures,)
            for first in (int(self._first_row[piece.source][entry]),)
        ]
        lengths = np.concatenate(parts)[found.order.many(np.arange(found.order.size))]
        return np.append(0, np.cumsum(lengths, dtype=np.int64))


def _narrow(lengths: RowLengths, most: int) -> NDArray[np.uint16] | RowLengths:
    """In half the memory where none exceeds `most` and that allows it."""
    return lengths.astype(np.uint16) if most < 1 << 16 else lengths


def _sums(lengths: RowLengths, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """[E] int64, the sums of `lengths` from each of the ascending `edges` [E + 1] to the next."""
    filled = np.flatnonzero(np.diff(edges))
    sums = np.zeros(len(edges) - 1, dtype=np.int64)
    if len(filled):
        sums[filled] = np.add.reduceat(lengths, edges[filled], dtype=np.int64)
    return sums


def _last(holds: Callable[[int], bool]) -> int:
    """The last number from 0 for which `holds`, which is true up to there (of 0 too) and false after."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
