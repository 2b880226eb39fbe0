"""The order of a window whose batches are of one source each.

In contrastive training the other examples of a batch are the negatives. Where sources mix, a model tells them apart by
their sources, which is easy and teaches nothing (Nussbaum et al. 2024, "Nomic Embed", section 3.2). So a batch is of
one source, and the sources take turns in random order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.permutation import Permutation, check_positions
from data_service.spread_order import SpreadOrder


@dataclass(frozen=True)
class SourceOrder:
    """Rows of several sources laid end to end; position i holds row `at(i)`.

    Attributes:
        sizes: rows of each source, multiples of `batch`.
        batch: consecutive positions, from 0 on, that are of one source.
        stretches: as of `WindowSize`, within each source.
        name: what names the draws.
    """

    sizes: tuple[int, ...]
    batch: int
    stretches: int
    name: tuple[int | str, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def at(self, position: int) -> int:
        return int(self.many(np.array([position]))[0])

    def many(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] int64 rows at `positions`, each in [0, size). Raises IndexError for a position outside."""
        check_positions(positions, self.size)
        turn, row = np.divmod(positions, self.batch)
        batches = Permutation.of(self.size // self.batch, "batches", *self.name).many(turn)
        ends = np.cumsum(self.sizes) // self.batch
        source = np.searchsorted(ends, batches, side="right")
        rows = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(source).tolist():
            here, size = source == number, self.sizes[number]
            start = int(ends[number]) * self.batch - size
            rows[here] = start + self._within(number).many(batches[here] * self.batch - start + row[here])
        return rows

    def _within(self, source: int) -> Permutation | SpreadOrder:
        """The order of one source's rows: random, but for neighbours, which go to different batches if so asked."""
        size, name = self.sizes[source], ("source", source, *self.name)
        stretches = min(self.stretches, size // self.batch)
        return SpreadOrder(size, stretches, name) if stretches > 1 else Permutation.of(size, *name)
