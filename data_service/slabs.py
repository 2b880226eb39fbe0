"""Slabs: the parts of a window that travel by themselves. Which sample lies in which is a closed form of four numbers.

A rank reads the same rows of every step. So a slab holds a stripe of the window's steps, the same rows of each, and a
node pulls the few slabs in which its ranks' rows lie. Layouts change nothing in the samples, and know nothing of
ranks: they stay when ranks come and go.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.plan import Grid


class Steps(NamedTuple):
    """How a stream is going to be read: `rows` samples at a time, one of which begins with `sample` of `epoch`."""

    rows: int
    epoch: int
    sample: int


class SlabLayout(NamedTuple):
    """A window's samples in slabs.

    Attributes:
        size: samples in the window.
        step: samples that are read together; `size` where that is not known, and slabs are simple slices.
        begin: which sample of its step the window's first one is.
        stripe: samples of a step in a slab; of the last slab maybe fewer.
    """

    size: int
    step: int
    begin: int
    stripe: int

    @classmethod
    def sliced(cls, size: int, rows: int) -> "SlabLayout":
        """Slabs of `rows` consecutive samples."""
        return cls(size, size, 0, min(size, rows))

    @classmethod
    def of(
        cls, grid: Grid, epoch: int, window: int, *, rows: int, steps: Steps | None = None
    ) -> "SlabLayout":
        """Slabs of about `rows` samples for a window that is read in `steps`. Slices where a step exceeds it."""
        size = grid.size(window)
        if steps is None or steps.rows > size:
            return cls.sliced(size, rows)
        epochs = (epoch - steps.epoch) * grid.samples_per_epoch
        begin = (epochs + grid.start(window) - steps.sample) % steps.rows
        slabs = max(1, -(-size // rows))
        return cls(size, steps.rows, begin, -(-steps.rows // slabs))

    @property
    def slabs(self) -> int:
        """How many there are, each with at least one sample."""
        return -(-self.step // self.stripe)

    def positions(self, slab: int) -> NDArray[np.int64]:
        """[N] int64, the window's samples in a slab, ascending."""
        first = slab * self.stripe
        stripe = np.arange(first, min(first + self.stripe, self.step))
        steps = -(-(self.begin + self.size) // self.step)
        found = (np.arange(steps)[:, None] * self.step + stripe - self.begin).ravel()
        return found[(found >= 0) & (found < self.size)]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(slab, start, stop): samples `first` to `last` of the window, in order, as rows of slabs."""
        while first < last:
            step, row = divmod(first + self.begin, self.step)
            slab = row // self.stripe
            base = slab * self.stripe
            width = min(self.stripe, self.step - base)
            missing = min(max(self.begin - base, 0), width)  # rows of the stripe before the window begins
            start = step * width - missing + row - base
            count = min(last - first, base + width - row)
            yield slab, start, start + count
            first += count

    def slabs_of(self, first: int, last: int) -> list[int]:
        """The slabs that hold samples `first` to `last` of the window, as they are needed."""
        end = min(last, first + self.step)  # then all slabs have come
        return list(dict.fromkeys(slab for slab, _, _ in self.pieces(first, end)))


def slab_rows(length: int, slab_tokens: int = 1 << 19) -> int:
    """Rows of `length` tokens in a slab of so many tokens: small enough to stay in a cache while it is made."""
    return max(1, slab_tokens // length)
