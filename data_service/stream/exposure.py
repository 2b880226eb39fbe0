"""Finds the samples that hold given text: the inverse of the plan.

A stretch of a block lies in known rows of that block, because a block is cut alike in all readings of one way. A row
has a number in its source's line, the line is divided into epochs and windows by arithmetic, and a window's order is a
permutation that can be inverted. So the samples of a document are found without a look at other documents: one block
is read, and one permutation is inverted for each sample that holds the text.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.result_cache import RecentResults
from data_service.samples.lanes import Lanes
from data_service.samples.make import cut_block, cutting_key, masking_key, row_text_ranges
from data_service.stream.plan import StreamPlan
from data_service.stream.sources import Corpora

_MAX_CACHED_ORDERS = 8  # windows whose inverted order is cached


@dataclass(frozen=True, order=True)
class TokenRange:
    """Tokens `start` to `stop` of block `block` of source number `source`, in the split of the stream."""

    source: int
    block: int
    start: int
    stop: int


class SampleFinder:
    """Finds samples of `plan` by the text that they hold. `corpora`: the corpora of the plan's spec."""

    def __init__(self, plan: StreamPlan, corpora: Corpora) -> None:
        self._plan, self._corpora = plan, corpora
        self._orders: RecentResults[tuple[int, int], NDArray[np.int64]] = RecentResults(_MAX_CACHED_ORDERS)

    def find_samples(self, places: Sequence[TokenRange], epochs: range) -> Iterator[tuple[TokenRange, int, int]]:
        """Yield (place, epoch, sample) for each sample of `epochs` that holds a token of a place.

        The places of one block follow each other, and so do the samples of one place; a sample that holds several
        places comes once for each. A block that only a grown version of the corpus has gives no sample.

        Raises:
            CorruptBlock, StoreError: a block cannot be read.
        """
        by_block: dict[tuple[int, int], list[TokenRange]] = {}
        for place in places:
            by_block.setdefault((place.source, place.block), []).append(place)
        for (source, block), together in by_block.items():
            if block >= len(self._corpora.tables[source]):
                continue
            cuts = _BlockRowText(self._corpora, source, block)
            for place in together:
                for epoch in epochs:
                    for row in self._rows_with_text(place, epoch, cuts):
                        yield place, epoch, self._sample_of_row(source, epoch, row)

    def _rows_with_text(self, place: TokenRange, epoch: int, cuts: "_BlockRowText") -> Iterator[int]:
        """Yield the rows of the source's line that the epoch takes and that hold a token of the place."""
        start = self._plan.rows_before_window(place.source, epoch, 0)
        stop = start + self._plan.epoch_layout.quotas[place.source]
        if start == stop:
            return
        line = self._plan.lines[place.source]
        for reading in range(line.reading_of_row(start)[0], line.reading_of_row(stop - 1)[0] + 1):
            first = line.row_number_in_line(reading, place.block, 0)
            for row in cuts.rows_with_text(place, reading):
                if start <= first + row < stop:
                    yield first + row

    def _sample_of_row(self, source: int, epoch: int, row: int) -> int:
        """Return the sample of an epoch that is row `row` of a source's line."""
        plan, layout = self._plan, self._plan.epoch_layout
        windows = range(layout.windows)
        # The last window that begins at or before the row.
        window = bisect_right(windows, row, key=lambda number: plan.rows_before_window(source, epoch, number)) - 1
        others = sum(
            layout.samples_before_window(other, window + 1) - layout.samples_before_window(other, window)
            for other in range(source)
        )
        thing = others + row - plan.rows_before_window(source, epoch, window)
        positions = self._orders.get((epoch, window), lambda: self._positions_by_row(epoch, window))
        return layout.window_start(window) + int(positions[thing])

    def _positions_by_row(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return [N] int64, the position in a window of each of its rows, which are counted piece after piece."""
        order = self._plan.window(epoch, window).order
        things = order.items_at(np.arange(order.size))
        positions = np.empty_like(things)
        positions[things] = np.arange(order.size)
        return positions


class _BlockRowText:
    """The text of the rows of one block. The block is read once."""

    def __init__(self, corpora: Corpora, source: int, block: int) -> None:
        self._spec, self._source, self._number = corpora.spec, source, block
        self._block = corpora.read_source_block(source, block)
        self._found: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}

    def rows_with_text(self, place: TokenRange, reading: int) -> list[int]:
        """Return the numbers of the block's rows that hold a token of the place, ascending, as cut in a reading."""
        rows, starts, stops = self._text_ranges(reading)
        # False for rows without text, too.
        held = np.maximum(starts, place.start) < np.minimum(stops, place.stop)
        return [int(row) for row in np.unique(rows[held])]

    def _text_ranges(self, reading: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return three arrays [S] int64: the row of each stretch of text, its first token, and the one behind it."""
        spec = self._spec
        # The rows of lanes are drawn again in each reading; other rows only depend on the way of cutting.
        kept_by = reading if isinstance(spec.input, Lanes) else reading % spec.input.cut_count
        if kept_by not in self._found:
            rows = cut_block(self._block, spec, cutting_key(spec, self._source, self._number, reading), self._source)
            key = masking_key(spec, self._source, self._number, reading)
            self._found = {kept_by: row_text_ranges(self._block, rows, spec, key), **self._ranges_by_cut()}
        return self._found[kept_by]

    def _ranges_by_cut(self) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Return what is worth keeping: the ways of cutting return, a reading of lanes does not."""
        return {} if isinstance(self._spec.input, Lanes) else self._found
