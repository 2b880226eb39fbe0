"""A source's endless line of rows: its blocks in a new random order each time it is read, cut at one length.

A corpus that is cut in K ways (`Input.structures`) is read in one way after another, with other rows each time; one
round of its line is K readings. The order of blocks does not depend on the length, so a place in the line can be found
again where rows are cut otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.recent import RecentResults
from data_service.samples.spec import StreamSpec
from data_service.stream.counts import RowCounts
from data_service.stream.order import Permutation

_LINES_KEPT = 2  # readings


@dataclass(frozen=True)
class BlockRows:
    """Rows `start` to `stop` of block `block` of a source, the `epoch`-th time it is read (from 0)."""

    source: int
    block: int
    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class SourceLine(NamedTuple):
    """A source's blocks in the order of one reading.

    Attributes:
        blocks: [B] int64, their indices.
        ends: [B] int64, rows up to the end of each.
    """

    blocks: NDArray[np.int64]
    ends: NDArray[np.int64]


class RowLine:
    """The line of source number `source` of `spec`, whose entries have these numbers of rows."""

    def __init__(self, spec: StreamSpec, source: int, counts: RowCounts) -> None:
        self._spec, self._source = spec, source
        self.structures = spec.input.structures
        self._counts = counts.reshape(-1, self.structures)
        self._starts = np.append(0, np.cumsum(self._counts.sum(axis=0)))
        self._lines: RecentResults[int, SourceLine] = RecentResults(_LINES_KEPT)

    @property
    def round(self) -> int:
        """Rows of one round."""
        return int(self._starts[-1])

    def reading(self, row: int) -> tuple[int, int]:
        """Which reading row `row` of the line falls into, and which row of that it is."""
        round_, rest = divmod(row, self.round)
        structure = int(np.searchsorted(self._starts, rest, side="right")) - 1
        return round_ * self.structures + structure, rest - int(self._starts[structure])

    def begin(self, epoch: int) -> int:
        """The first row of reading `epoch`."""
        round_, structure = divmod(epoch, self.structures)
        return round_ * self.round + int(self._starts[structure])

    def line(self, epoch: int) -> SourceLine:
        """The blocks of one reading. The last few are remembered."""
        return self._lines.get(epoch, lambda: self._draw_line(epoch))

    def block_rows(self, block: int, epoch: int) -> int:
        """Rows of a block, as it is cut in that reading."""
        return int(self._counts[block, epoch % self.structures])

    def pieces(self, start: int, stop: int) -> Iterator[BlockRows]:
        """Rows `start` to `stop` of the line."""
        while start < stop:
            epoch, row = self.reading(start)
            blocks, ends = self.line(epoch)
            end = min(row + stop - start, int(ends[-1]))
            index = int(np.searchsorted(ends, row, side="right"))
            start += end - row
            while row < end:
                block, block_end = int(blocks[index]), int(ends[index])
                base = block_end - self.block_rows(block, epoch)
                yield BlockRows(self._source, block, epoch, row - base, min(end, block_end) - base)
                row, index = min(end, block_end), index + 1

    def row_of(self, epoch: int, block: int, row: int) -> int:
        """The row of the line that is row `row` of `block` in reading `epoch`; one past its last: what follows it."""
        blocks, ends = self.line(epoch)
        index = int(np.flatnonzero(blocks == block)[0])
        return self.begin(epoch) + int(ends[index]) - self.block_rows(block, epoch) + row

    def _draw_line(self, epoch: int) -> SourceLine:
        structure = epoch % self.structures
        counts = self._counts[:, structure]
        reading = epoch if self._spec.one_source is None else structure
        fingerprint = self._spec.sources[self._source].manifest_fingerprint
        name = (self._spec.seed, reading, fingerprint, self._spec.split)
        blocks = Permutation.of(len(counts), "blocks", *name).many(np.arange(len(counts)))
        return SourceLine(blocks, np.cumsum(counts[blocks]))
