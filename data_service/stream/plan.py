"""The plan: which row of which block is sample `n` of epoch `e`. It is computed by arithmetic and prefix sums, without
iteration.

Every source is an endless sequence of rows: its blocks, cut into rows of one length, in a new random order in each
reading, which is a pass over the source. If blocks can be cut in K ways (`RowInput.cut_count`), successive readings use
one way after another; K readings are one round. The order of blocks does not depend on the row length, so a position in
the sequence can be found again with rows of another length.

An epoch takes the next `quota` rows of each sequence. It is cut into windows. Window `w` of `W` takes the `w`-th of `W`
even slices of every source's quota, so a mixture is exact to one sample in every window. Then the samples of each
window are shuffled by themselves; neighbours in the text are kept apart if the spec says so.

If each batch is of one source (`spec.one_source`), no row may occur twice in an epoch, because a batch that holds an
example twice would use it as its own negative. So an epoch takes from each source at most the rows that it has, and a
source's blocks have the same order in all readings: then any range of its sequence that is no longer than a reading
holds each row at most once.

If the spec has stages, an epoch consists of the rows of its last stage, which continues where the earlier stages ended
(`stages.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BlockTable
from data_service.errors import PlanError
from data_service.result_cache import RecentResults
from data_service.samples.lanes import Lanes
from data_service.samples.masking import NoMasking, RowMasking
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.spec import StreamSpec
from data_service.stream.counts import RowCounts
from data_service.stream.mixture import (
    min_weight,
    mixed_batch_quotas,
    one_source_batch_quotas,
    source_weights,
    unread_sources,
)
from data_service.stream.order import LaneOrder, Permutation, RowOrder, SourceOrder, SpreadOrder

_MAX_CACHED_READINGS = 2  # passes over a source whose order of blocks is cached


@dataclass(frozen=True)
class BlockRows:
    """Rows `start` to `stop` of block `block` of a source. `epoch`: number of the pass over the source, from 0."""

    source: int
    block: int
    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class ShuffledBlocks(NamedTuple):
    """A source's blocks in the order of one pass over the source.

    Attributes:
        blocks: [B] int64, numbers of the blocks.
        ends: [B] int64, number of rows up to the end of each block.
    """

    blocks: NDArray[np.int64]
    ends: NDArray[np.int64]


class SourceRowSequence:
    """The endless sequence of a source's rows, pass after pass over the source. `counts`: `RowCounts` of the source."""

    def __init__(self, spec: StreamSpec, source: int, counts: RowCounts) -> None:
        self._spec, self._source = spec, source
        self.structures = spec.input.cut_count
        self._counts = counts.reshape(-1, self.structures)
        self._starts = np.append(0, np.cumsum(self._counts.sum(axis=0)))
        self._lines: RecentResults[int, ShuffledBlocks] = RecentResults(_MAX_CACHED_READINGS)

    @property
    def rows_per_round(self) -> int:
        """Number of rows in a round: one pass over the source for each way of cutting its blocks."""
        return int(self._starts[-1])

    def reading_of_row(self, row: int) -> tuple[int, int]:
        """Return (reading, row): the pass over the source that contains row `row`, and the row's number in it."""
        round_, rest = divmod(row, self.rows_per_round)
        structure = int(np.searchsorted(self._starts, rest, side="right")) - 1
        return round_ * self.structures + structure, rest - int(self._starts[structure])

    def first_row_of_reading(self, epoch: int) -> int:
        """Return the number of rows in all passes before pass `epoch` over the source."""
        round_, structure = divmod(epoch, self.structures)
        return round_ * self.rows_per_round + int(self._starts[structure])

    def shuffled_blocks(self, epoch: int) -> ShuffledBlocks:
        """Return the blocks in the order of pass `epoch` over the source. The last few results are cached."""
        return self._lines.get(epoch, lambda: self._shuffle_blocks(epoch))

    def block_row_count(self, block: int, epoch: int) -> int:
        """Return the number of rows into which a block is cut in pass `epoch` over the source."""
        return int(self._counts[block, epoch % self.structures])

    def split_by_block(self, start: int, stop: int) -> Iterator[BlockRows]:
        """Yield rows `start` to `stop` of the sequence, block by block."""
        while start < stop:
            epoch, row = self.reading_of_row(start)
            blocks, ends = self.shuffled_blocks(epoch)
            end = min(row + stop - start, int(ends[-1]))
            index = int(np.searchsorted(ends, row, side="right"))
            start += end - row
            while row < end:
                block, block_end = int(blocks[index]), int(ends[index])
                base = block_end - self.block_row_count(block, epoch)
                yield BlockRows(self._source, block, epoch, row - base, min(end, block_end) - base)
                row, index = min(end, block_end), index + 1

    def row_number_in_line(self, epoch: int, block: int, row: int) -> int:
        """Return the number in the sequence of row `row` of `block` in pass `epoch` over the source.

        If `row` is the block's number of rows, the result is the first row after the block.
        """
        blocks, ends = self.shuffled_blocks(epoch)
        index = int(np.flatnonzero(blocks == block)[0])
        return self.first_row_of_reading(epoch) + int(ends[index]) - self.block_row_count(block, epoch) + row

    def _shuffle_blocks(self, epoch: int) -> ShuffledBlocks:
        structure = epoch % self.structures
        counts = self._counts[:, structure]
        reading = epoch if self._spec.one_source is None else structure
        fingerprint = self._spec.sources[self._source].manifest_fingerprint
        name = (self._spec.seed, reading, fingerprint, self._spec.split)
        blocks = Permutation.from_name(len(counts), "blocks", *name).items_at(np.arange(len(counts)))
        return ShuffledBlocks(blocks, np.cumsum(counts[blocks]))


# Bytes of columns of `Samples`, for an estimate of a window's size:
_BYTES_PER_TARGET = 8  # position of the target
_BYTES_PER_ORDER_ENTRY = 4  # position of a token in a permuted order
_BYTES_PER_ROW = 16  # start of the row, start of its second segment, and its label
_BYTES_PER_TEXT = 4  # start of the text
_BYTES_PER_FORM = 8  # start of the row's corrupted form
_UINT32_RANGE = 1 << 32
_GOLDEN_RATIO_32 = 0x9E3779B9  # 2**32 / phi: multiples spread evenly over a 32-bit word


@dataclass(frozen=True)
class EpochLayout:
    """The division of an epoch into windows: all that a consumer of samples needs to know of the plan.

    Attributes:
        quotas: numbers of samples of each source in an epoch.
        window_bytes: estimate of the largest size of a window's samples, in bytes.
        granule: number that divides each source's quota and its samples in each window. It is the number of rows in a
            step if they continue the rows of the previous step or are from one source; else 1.
        staggered: whether the slices of different sources begin at different places of the epoch, so that small sources
            do not all give their few batches to the same window.
    """

    quotas: tuple[int, ...]
    windows: int
    window_bytes: int
    granule: int = 1
    staggered: bool = False

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.quotas)

    def window_start(self, window: int) -> int:
        """Return the number of a window's first sample. `window_start(windows)` is the end of the epoch."""
        return sum(self.samples_before_window(source, window) for source in range(len(self.quotas)))

    def samples_before_window(self, source: int, window: int) -> int:
        """Return the number of samples of a source that precede a window."""
        shift = (source * _GOLDEN_RATIO_32 % _UINT32_RANGE) * self.windows // _UINT32_RANGE if self.staggered else 0
        return (self.quotas[source] // self.granule * window + shift) // self.windows * self.granule

    def window_with_sample(self, sample: int) -> int:
        """Return the number of the window that holds a sample."""
        window = sample * self.windows // self.samples_per_epoch
        while self.window_start(window) > sample:
            window -= 1
        while self.window_start(window + 1) <= sample:
            window += 1
        return window

    def split_by_window(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (window, first, last) for samples `start` to `stop` of an epoch. `first` and `last` count from
        the window's start."""
        if not 0 <= start <= stop <= self.samples_per_epoch:
            raise IndexError(f"samples {start} to {stop} are outside an epoch of {self.samples_per_epoch}")
        while start < stop:
            window = self.window_with_sample(start)
            base, end = self.window_start(window), min(stop, self.window_start(window + 1))
            yield window, start - base, end - base
            start = end

    def window_size(self, window: int) -> int:
        return self.window_start(window + 1) - self.window_start(window)


@dataclass(frozen=True)
class StageSourceRows:
    """The rows that a stage takes from each source.

    Attributes:
        begins: number of rows of each source's sequence before the stage.
        quotas: number of rows of each source in an epoch of the stage.
    """

    begins: tuple[int, ...]
    quotas: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The rows of a window: sample i is row `order.item_at(i)`, counted through all `pieces` in order.

    Attributes:
        first: number of its first sample, counted from the beginning of epoch 0.
    """

    pieces: tuple[BlockRows, ...]
    order: RowOrder
    first: int = 0


@dataclass(frozen=True)
class RowOrigin:
    """The origin of a sample: row `row` of a source's block. `epoch`: number of the pass over the source, from 0."""

    source: int
    block: int
    row: int
    epoch: int


class StreamPlan:
    """Maps the samples of a spec to rows of blocks.

    Args:
        tables: blocks of each source.
        counts: `RowCounts` of each source.
        share: rows of the spec's last stage, if it has stages (`data_service.stream.stages`). An epoch then consists of
            these rows.

    Raises:
        PlanError: a source has no row, or too few for one step of lanes; or its weight gives it no row in an epoch.
    """

    def __init__(
        self,
        spec: StreamSpec,
        tables: tuple[BlockTable, ...],
        counts: tuple[RowCounts, ...],
        share: StageSourceRows | None = None,
    ) -> None:
        for source, rows in zip(spec.sources, counts, strict=True):
            if not rows.sum():
                text = f"block of {spec.length} tokens" if isinstance(spec.input, Lanes) else "text"
                raise PlanError(
                    f"source {source.name} ({source.uri}) has no {text} in its {spec.split} split",
                    remedy="leave the source out, or build it from more text",
                )
        self.spec = spec
        self.lines = tuple(SourceRowSequence(spec, source, rows) for source, rows in enumerate(counts))
        """The row sequence of each source."""
        totals = tuple(line.rows_per_round for line in self.lines)
        self.begins = (0,) * len(counts) if share is None else share.begins
        """Number of rows of each source's sequence before epoch 0."""
        self.epoch_layout = _epoch_layout(spec, totals, sum(int(table.tokens.sum()) for table in tables), share)
        self.notes = _unread_remarks(spec, totals, self.epoch_layout.samples_per_epoch) if share is None else ()
        """Remarks on this plan for the user."""

    def window(self, epoch: int, window: int) -> Window:
        """Return the rows of window `window` of `epoch`."""
        stretches = [
            range(
                self.rows_before_window(source, epoch, window),
                self.rows_before_window(source, epoch, window + 1),
            )
            for source in range(len(self.lines))
        ]
        pieces = [
            piece
            for line, rows in zip(self.lines, stretches, strict=True)
            for piece in line.split_by_block(rows.start, rows.stop)
        ]
        corpora = (source.manifest_fingerprint for source in self.spec.sources)
        stage = ("stage", len(self.spec.stages)) if self.spec.stages else ()
        name = ("window", self.spec.seed, epoch, window, *corpora, self.spec.split, *stage)
        first = epoch * self.epoch_layout.samples_per_epoch + self.epoch_layout.window_start(window)
        return Window(tuple(pieces), self._window_order(tuple(map(len, stretches)), name), first)

    def _window_order(self, sizes: tuple[int, ...], name: tuple[int | str, ...]) -> RowOrder:
        """Return the order of a window's rows. `sizes`: rows of each source; `name`: parts of the random key."""
        size = sum(sizes)
        if self.spec.one_source is not None:
            return SourceOrder(size, sizes, self.spec.one_source, self.spec.window.stretches, name)
        if self.spec.lanes is not None and isinstance(self.spec.input, Lanes):
            return LaneOrder(size, self.spec.lanes, 2 if self.spec.input.both_directions else 1)
        if self.spec.window.stretches > 1:
            return SpreadOrder(size, self.spec.window.stretches, name)
        return Permutation.from_name(size, *name)

    def origin_of_sample(self, epoch: int, sample: int) -> RowOrigin:
        """Return the row that is sample `sample` of `epoch`."""
        ((window, position, _),) = self.epoch_layout.split_by_window(sample, sample + 1)
        found = self.window(epoch, window)
        thing = found.order.item_at(position)
        ends = np.cumsum([len(piece) for piece in found.pieces])
        piece = found.pieces[int(np.searchsorted(ends, thing, side="right"))]
        before = int(np.sum([len(other) for other in found.pieces[: found.pieces.index(piece)]]))
        return RowOrigin(piece.source, piece.block, piece.start + thing - before, piece.epoch)

    def rows_before_window(self, source: int, epoch: int, window: int) -> int:
        """Return the number of rows of a source's sequence before a window."""
        quota = self.epoch_layout.quotas[source]
        return self.begins[source] + epoch * quota + self.epoch_layout.samples_before_window(source, window)

    def rows_in_block(self, piece: BlockRows) -> int:
        """Return the number of rows into which the whole block of `piece` is cut."""
        return self.lines[piece.source].block_row_count(piece.block, piece.epoch)


def _epoch_layout(
    spec: StreamSpec, totals: tuple[int, ...], text_tokens: int, share: StageSourceRows | None
) -> EpochLayout:
    """Return the layout of an epoch. `totals`: rows of each source in a round; `share`: as in `StreamPlan`."""
    granule = spec.lanes or spec.one_source or 1
    if share is not None:
        counted = share.quotas
    elif spec.one_source is None:
        counted = mixed_batch_quotas(spec.sources, _source_weights(spec, totals), totals, granule)
    else:
        counted = one_source_batch_quotas(spec.sources, totals, spec.one_source, spec.temperature, spec.translations)
    rows = sum(counted)
    row_tokens = max(1, int(text_tokens * spec.input.cut_count * spec.input.mean_token_uses) // sum(totals))
    row_tokens = min(row_tokens, spec.row_length) if isinstance(spec.masking, NoMasking) else row_tokens
    if isinstance(spec.input, Lanes):
        row_tokens = spec.length  # rows of lanes all have this length, and overlap
    wanted = max(spec.window.samples, spec.window.least_tokens // row_tokens)
    wanted = min(wanted, max(1, spec.window.most_tokens // row_tokens))
    windows = max(1, rows // max(wanted, granule))
    most = min(spec.row_length, row_tokens + 8 * spec.input.texts_per_row)
    window_bytes = round(-(-rows // windows) * _estimate_row_bytes(spec, most))
    return EpochLayout(counted, windows, window_bytes, granule, staggered=spec.one_source is not None)


def _source_weights(spec: StreamSpec, totals: tuple[int, ...]) -> list[float] | None:
    return source_weights(spec.sources, totals, spec.temperature, spec.translations)


def _estimate_row_bytes(spec: StreamSpec, tokens: int) -> float:
    """Return the estimated bytes of a row of `tokens` tokens in `Samples`."""
    token = spec.vocabulary.ordinary.itemsize
    masking = spec.masking_at_highest_rate
    if isinstance(masking, NoMasking):
        return _BYTES_PER_ROW + spec.input.texts_per_row * _BYTES_PER_TEXT + tokens * token
    targets = float(masking.predict) if isinstance(masking, PermutedPrediction) else masking.max_target_count(tokens)
    size = _BYTES_PER_ROW + tokens * token + targets * (token + _BYTES_PER_TARGET)
    if isinstance(masking, RowMasking) and masking.makes_corrupted_form:
        size += tokens * token + _BYTES_PER_FORM
    return size + tokens * _BYTES_PER_ORDER_ENTRY if isinstance(spec.input, Lanes) else size


def _unread_remarks(spec: StreamSpec, totals: tuple[int, ...], rows: int) -> tuple[str, ...]:
    """Return remarks on sources that an evaluation never reads, because their weight is too small.

    Raises PlanError: training would never read a source.
    """
    weights = _source_weights(spec, totals) or []
    notes: list[str] = []
    if spec.one_source is not None:  # `one_source_batch_quotas` has checked the weights
        return ()
    for number, why in unread_sources(weights, rows).items():
        source = spec.sources[number]
        problem = f"source {source.name} ({source.uri}), {spec.split} split: {why}"
        if spec.split == "train":
            least = min_weight(weights, number, rows)
            raise PlanError(problem, remedy=f"raise its weight to {least:.2g} or more, or leave the source out")
        notes.append(problem)
    return tuple(notes)
