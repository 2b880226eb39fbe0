"""The order of a window in which the text's neighbours go to different batches: random, but for that.

In an even shuffle of a window of 16 batches, one row in 16 has its continuation in its own batch, however small the
blocks are: row and continuation are in the window together. So the window is cut into stretches (about a batch each),
and things that follow each other are dealt to them in turn, with a stride near the golden ratio's. With 16 stretches
the stride is 7: two rows in one stretch are at least 16 apart in the text, two in adjacent ones (a batch may lie
across both) at least 7. Within a stretch the order is random.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from data_service.permutation import Permutation, check_positions
from data_service.rng import draws64, stream_key

_GOLDEN = (3 - 5**0.5) / 2  # 0.38: its multiples stay as far from whole numbers as those of any


@dataclass(frozen=True)
class SpreadOrder:
    """`size` things, dealt to `stretches` of about as many positions, as `name` says: position i holds thing `at(i)`.

    Things d apart share a stretch only if d is a multiple of `stretches`.
    """

    size: int
    stretches: int
    name: tuple[int | str, ...]

    def at(self, position: int) -> int:
        return int(self.many(np.array([position]))[0])

    def many(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] int64 things at `positions`, each in [0, size). Raises IndexError for a position outside."""
        check_positions(positions, self.size)
        residues = self._residues()
        sizes = (self.size - residues + self.stretches - 1) // self.stretches
        starts = np.append(0, np.cumsum(sizes))
        stretch = np.searchsorted(starts, positions, side="right") - 1
        things = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(stretch).tolist():
            here, residue = stretch == number, int(residues[number])
            order = Permutation.of(int(sizes[number]), *self.name, residue)
            things[here] = order.many(positions[here] - starts[number]) * self.stretches + residue
        return things

    def _residues(self) -> NDArray[np.int64]:
        """[stretches] int64: stretch k holds the things that leave residues[k] when divided by `stretches`."""
        first = int(draws64(stream_key("stretches", *self.name), 0, 1)[0] % np.uint64(self.stretches))
        dealt = (first + _stride(self.stretches) * np.arange(self.stretches)) % self.stretches
        return np.argsort(dealt)


def _stride(stretches: int) -> int:
    """The number nearest to the golden share of `stretches` that shares no divisor with it."""
    coprime = (n for n in range(1, stretches + 1) if gcd(n, stretches) == 1)
    return min(coprime, key=lambda n: abs(n - _GOLDEN * stretches))
