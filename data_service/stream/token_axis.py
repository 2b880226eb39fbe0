"""Counts a stream in tokens, for batches of a given number of tokens (RoBERTa's DOC-SENTENCES).

A step takes the samples that begin within its range of tokens. So its rows depend only on its position, not on
earlier steps. Tokens are counted by the same arithmetic as the plan's rows: the number of tokens before a row of a
source is a prefix sum over its blocks; before a window it is the sum over the sources; within a window the
lengths of its rows are added up.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from data_service.errors import CorpusError
from data_service.result_cache import RecentResults
from data_service.samples.spec import StreamSpec
from data_service.stream.counts import RowCounts, RowLengths
from data_service.stream.plan import BlockRows, SourceRowSequence, StreamPlan

_CACHED_WINDOWS = 4  # windows whose token counts are cached


class LineTokens:
    """A source's row sequence, measured in tokens.

    `counts`, `lengths`: `RowCounts` and `RowLengths` of the source (`data_service.stream.counts`).
    """

    def __init__(self, line: SourceRowSequence, counts: RowCounts, lengths: NDArray[np.unsignedinteger]) -> None:
        self._line, self._lengths, self._structures = line, lengths, line.structures
        self._first_row = np.append(0, np.cumsum(counts))
        # Tokens before each entry of `counts`: each block, in each way of cutting it.
        self._up_to = np.append(0, np.cumsum(_sums_between(lengths, self._first_row)))
        by_structure = np.diff(self._up_to).reshape(-1, self._structures).sum(axis=0)
        self._readings = np.append(0, np.cumsum(by_structure))  # tokens before each pass over the source in a round

    def tokens_before(self, row: int) -> int:
        """Return the number of tokens in the first `row` rows of the sequence."""
        epoch, rest = self._line.reading_of_row(row)
        rounds, structure = divmod(epoch, self._structures)
        tokens = rounds * int(self._up_to[-1]) + int(self._readings[structure])
        if not rest:
            return tokens
        blocks, ends = self._line.shuffled_blocks(epoch)
        index = int(np.searchsorted(ends, rest, side="right"))
        entries = blocks * self._structures + structure
        tokens += int(np.diff(self._up_to)[entries[:index]].sum())
        done = int(ends[index - 1]) if index else 0
        first = int(self._first_row[entries[index]]) if rest > done else 0
        return tokens + int(self._lengths[first : first + rest - done].sum())

    def first_row_at_token(self, token: int) -> int:
        """Return the number of the first row that begins at `token` or after it."""
        return _last_number_where(lambda row: row == 0 or self.tokens_before(row - 1) < token)

    def row_lengths(self, piece: BlockRows) -> NDArray[np.unsignedinteger]:
        """Return [N], the number of tokens of each row of `piece`."""
        first = int(self._first_row[piece.block * self._structures + piece.epoch % self._structures])
        return self._lengths[first + piece.start : first + piece.stop]


class TokenAxis:
    """A `data_service.stream.positions.StreamAxis` in tokens, special ones included.

    `counts`, `lengths`: of each source, as in `LineTokens`. Raises CorpusError: the numbers of rows and lengths differ.
    """

    def __init__(self, plan: StreamPlan, counts: tuple[RowCounts, ...], lengths: tuple[RowLengths, ...]) -> None:
        self._plan = plan
        self._lines = measure_lines(plan.spec, plan.lines, counts, lengths)
        self._begin = sum(map(LineTokens.tokens_before, self._lines, plan.begins))
        self._kept: RecentResults[tuple[int, int], NDArray[np.int64]] = RecentResults(_CACHED_WINDOWS)

    def unit_of_sample(self, epoch: int, sample: int) -> int:
        """Return the number of tokens before a sample, from the start of epoch 0.

        A sample one past the last stands for the start of the next epoch.
        """
        epoch_layout = self._plan.epoch_layout
        if sample == epoch_layout.samples_per_epoch:
            return self._tokens_before(epoch + 1, 0)
        window = epoch_layout.window_with_sample(sample)
        return self._tokens_before(epoch, window) + int(
            self._token_edges_in(epoch, window)[sample - epoch_layout.window_start(window)]
        )

    def sample_at_unit(self, unit: int) -> tuple[int, int]:
        """Return (epoch, sample) of the first sample that begins at token `unit` or after it."""
        epoch = _last_number_where(lambda e: self._tokens_before(e, 0) <= unit)
        windows = self._plan.epoch_layout.windows
        window = _last_number_where(lambda w: w < windows and self._tokens_before(epoch, w) <= unit)
        within = self._token_edges_in(epoch, window)
        sample = int(np.searchsorted(within[:-1], unit - self._tokens_before(epoch, window)))
        sample += self._plan.epoch_layout.window_start(window)
        return (epoch, sample) if sample < self._plan.epoch_layout.samples_per_epoch else (epoch + 1, 0)

    def _tokens_before(self, epoch: int, window: int) -> int:
        """Return the number of tokens before a window, from the start of epoch 0."""
        rows = (self._plan.rows_before_window(source, epoch, window) for source in range(len(self._lines)))
        return sum(map(LineTokens.tokens_before, self._lines, rows)) - self._begin

    def _token_edges_in(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return [N + 1] int64, the number of tokens before each sample of a window, and in the whole window."""
        return self._kept.get((epoch, window), lambda: self._compute_token_edges(epoch, window))

    def _compute_token_edges(self, epoch: int, window: int) -> NDArray[np.int64]:
        found = self._plan.window(epoch, window)
        parts = [self._lines[piece.source].row_lengths(piece) for piece in found.pieces]
        lengths = np.concatenate(parts)[found.order.items_at(np.arange(found.order.size))]
        return np.append(0, np.cumsum(lengths, dtype=np.int64))


def measure_lines(
    spec: StreamSpec,
    lines: Sequence[SourceRowSequence],
    counts: Sequence[RowCounts],
    lengths: Sequence[RowLengths],
) -> tuple[LineTokens, ...]:
    """Return the row sequences, measured in tokens. Raises CorpusError: the numbers of rows and lengths differ."""
    for source, rows, measured in zip(spec.sources, counts, lengths, strict=True):
        if rows.sum() != len(measured):
            raise CorpusError(
                f"source {source.name}: {len(measured)} row lengths are cached, but there are {rows.sum()} rows",
                remedy="delete the cache of row lengths, which belongs to another corpus, and start again",
            )
    return tuple(
        LineTokens(line, rows, _as_uint16_if_small(measured, spec.row_length))
        for line, rows, measured in zip(lines, counts, lengths, strict=True)
    )


def _as_uint16_if_small(lengths: RowLengths, most: int) -> NDArray[np.uint16] | RowLengths:
    """Return the lengths as uint16 if their upper bound `most` fits; else unchanged."""
    return lengths.astype(np.uint16) if most < 1 << 16 else lengths


def _sums_between(lengths: RowLengths, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [E] int64, the sum of `lengths[edges[i]:edges[i + 1]]` for each i. `edges` [E + 1] ascend."""
    filled = np.flatnonzero(np.diff(edges))
    sums = np.zeros(len(edges) - 1, dtype=np.int64)
    if len(filled):
        sums[filled] = np.add.reduceat(lengths, edges[filled], dtype=np.int64)
    return sums


def _last_number_where(holds: Callable[[int], bool]) -> int:
    """Return the last number for which `holds` is true. It must be true from 0 to that number and false after it."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
