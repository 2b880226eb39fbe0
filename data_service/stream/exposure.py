"""Finds the samples that hold given text. This inverts the plan (`plan.py`), which maps each sample to a block's row.

The rows of a block that hold a text are known after cutting this block alone. A row has a number in its source's
sequence of rows (`SourceRowSequence`), this sequence is divided into epochs and windows by arithmetic, and a window's
order is a permutation that can be inverted. So finding a document's samples does not need other documents: one block is
read, and the permutation of each window that holds the text is inverted, once for all given documents.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from data_service.result_cache import RecentResults
from data_service.samples.lanes import Lanes
from data_service.samples.make import cut_block, cutting_key, masking_key, row_text_ranges
from data_service.stream.plan import StreamPlan
from data_service.stream.sources import Corpora

RowTextRanges = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Three arrays [S] int64: for each range of text in a row, the row, the first token, and the token after the range."""


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

    def find_samples(self, places: Sequence[TokenRange], epochs: range) -> Iterator[tuple[TokenRange, int, int]]:
        """Yield (place, epoch, sample) for each sample of `epochs` that holds a token of one of `places`.

        The order is block by block, then place by place; a sample that holds several places comes once for each. Places
        in blocks that only a grown version of the corpus has give no samples.

        Raises:
            CorruptBlock, StoreError: a block cannot be read.
        """
        by_block: dict[tuple[int, int], list[TokenRange]] = {}
        for place in places:
            if place.block < len(self._corpora.tables[place.source]):
                by_block.setdefault((place.source, place.block), []).append(place)
        first_rows = self._find_first_rows(by_block, epochs)
        found: list[tuple[TokenRange, int, int]] = []
        for (source, block), together in by_block.items():
            cuts = _BlockRowText(self._corpora, source, block)
            for place, epoch in product(together, epochs):
                rows, readings = self._rows_of_epoch(source, epoch)
                for reading in readings:
                    first = first_rows[source, block, reading]
                    mine = (first + row for row in cuts.rows_with_text(place, reading))
                    found += [(place, epoch, row) for row in mine if row in rows]
        samples = self._find_samples_of_rows([(place.source, epoch, row) for place, epoch, row in found])
        for (place, epoch, _), sample in zip(found, samples, strict=True):
            yield place, epoch, sample

    def _rows_of_epoch(self, source: int, epoch: int) -> tuple[range, range]:
        """Return the rows of a source that the epoch takes, and the passes over the source that they are in."""
        start = self._plan.rows_before_window(source, epoch, 0)
        rows, line = range(start, start + self._plan.epoch_layout.quotas[source]), self._plan.lines[source]
        if not rows:
            return rows, range(0)
        return rows, range(line.reading_of_row(rows[0])[0], line.reading_of_row(rows[-1])[0] + 1)

    def _find_first_rows(self, blocks: Iterable[tuple[int, int]], epochs: range) -> dict[tuple[int, int, int], int]:
        """Return the number of a block's first row in its source's sequence, by (source, block, pass over the source).

        `blocks`: (source, block). The order of the blocks is computed once for each pass in `epochs`.
        """
        found: dict[tuple[int, int, int], int] = {}
        for source, those in groupby(sorted(blocks), key=lambda both: both[0]):
            line, chosen = self._plan.lines[source], [block for _, block in those]
            for reading in sorted({reading for epoch in epochs for reading in self._rows_of_epoch(source, epoch)[1]}):
                order, ends = line.shuffled_blocks(reading)
                firsts = np.empty_like(ends)
                firsts[order] = line.first_row_of_reading(reading) + np.append(0, ends[:-1])
                found |= {(source, block, reading): int(firsts[block]) for block in chosen}
        return found

    def _find_samples_of_rows(self, rows: Sequence[tuple[int, int, int]]) -> list[int]:
        """Return for each (source, epoch, row of the source's sequence) the number of the row's sample in the epoch.

        The order of a window is inverted once for all its rows.
        """
        layout, samples = self._plan.epoch_layout, [0] * len(rows)
        by_window: dict[tuple[int, int], list[int]] = {}
        for number, (source, epoch, row) in enumerate(rows):
            # The row is in the last window that begins at or before it.
            begins = partial(self._plan.rows_before_window, source, epoch)
            window = bisect_right(range(layout.windows), row, key=begins) - 1
            by_window.setdefault((epoch, window), []).append(number)
        for epoch, window in sorted(by_window):
            sizes = [
                layout.samples_before_window(source, window + 1) - layout.samples_before_window(source, window)
                for source in range(len(layout.quotas))
            ]
            positions, start = self._positions_by_row(epoch, window), layout.window_start(window)
            for number in by_window[epoch, window]:
                source, _, row = rows[number]
                thing = sum(sizes[:source]) + row - self._plan.rows_before_window(source, epoch, window)
                samples[number] = start + int(positions[thing])
        return samples

    def _positions_by_row(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return [N] int64, the position of each of a window's rows, which are numbered as in `Window`."""
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
        # Lanes are cut differently in each pass over the source; other rows repeat after `cut_count` passes.
        self._kept: RecentResults[int, RowTextRanges] = RecentResults(corpora.spec.input.cut_count)

    def rows_with_text(self, place: TokenRange, reading: int) -> list[int]:
        """Return the ascending numbers of the block's rows that hold a token of `place` in a pass over the source."""
        rows, starts, stops = self._text_ranges(reading)
        # This is False also for rows without text.
        held = np.maximum(starts, place.start) < np.minimum(stops, place.stop)
        return [int(row) for row in np.unique(rows[held])]

    def _text_ranges(self, reading: int) -> RowTextRanges:
        """Return the ranges of text in the block's rows, as cut in a pass over the source."""
        spec = self._spec
        # Rows of lanes depend on the pass; other rows depend only on the way of cutting.
        kept_by = reading if isinstance(spec.input, Lanes) else reading % spec.input.cut_count

        def find_text_ranges() -> RowTextRanges:
            rows = cut_block(self._block, spec, cutting_key(spec, self._source, self._number, reading), self._source)
            return row_text_ranges(self._block, rows, spec, masking_key(spec, self._source, self._number, reading))

        return self._kept.get(kept_by, find_text_ranges)
