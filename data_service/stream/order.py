"""Orders of the rows of a window, the part of an epoch that is shuffled at a time. An order computes the row at any
position directly, in constant memory.

`Permutation`: a random order. A Feistel network permutes the smallest power of two that holds the domain. Results
outside the domain are permuted again until they fall inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002); on average fewer than two rounds are needed.

`LaneOrder`: for rows that continue from step to step (XLNet's recurrence). A window of S steps is read as L lanes, each
a stretch of S consecutive rows of the window's blocks: lane i of step s + 1 continues lane i of step s. With both
directions, lanes 2j and 2j + 1 read the same stretch. The second one reads backward, from the last row to the first, so
its steps continue each other, too. At the end of a block a lane continues with another block; at the end of a window
all lanes do. There XLNet's cache holds other text, as at every border of two documents. That happens in one step of
S. `WindowSize` decides S: at 8,192 rows of 512 tokens its bound on memory allows 32.

`SpreadOrder`: a random order in which neighbours in the text go to different batches. In a uniform shuffle of a
window of 16 batches, one row in 16 has its continuation in its own batch, even if blocks are small, because both are
in the window. So the window is cut into stretches of about a batch, and consecutive rows are dealt to them
round-robin, with a stride near the golden ratio's. With 16 stretches the stride is 7: two rows of one stretch are at
least 16 apart in the text, and two of adjacent stretches (a batch may lie across both) at least 7. Within a stretch
the order is random.

`SourceOrder`: an order in which each batch is of one source. In contrastive training the other examples of a batch are
the negatives. If a batch mixes sources, a model can distinguish negatives by their sources, which is easy and teaches
nothing (Nussbaum et al. 2024, "Nomic Embed", section 3.2). The batches of the sources follow each other in random
order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draw_uint64, stream_key

_FEISTEL_ROUNDS = 6  # see `Permutation`
_CHUNK_NUMBERS = 1 << 15  # numbers permuted at a time, which fit in a processor's cache


class RowOrder(ABC):
    """An order of `size` items, such as the rows of a window: position i holds item `item_at(i)`."""

    size: int

    def item_at(self, position: int) -> int:
        return int(self.items_at(np.array([position]))[0])

    def items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [N] int64, the items at `positions`. Raises IndexError if a position is not in [0, size)."""
        if len(positions) and not (positions.min() >= 0 and positions.max() < self.size):
            raise IndexError(f"positions {positions.min()}..{positions.max()} are outside an order of {self.size}")
        return self._items_at(positions)

    @abstractmethod
    def _items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Permutation(RowOrder):
    """A random order, determined by `key`.

    With six rounds, not all orders of few items are equally likely: among 5 or 6 items, some item and position occur up
    to a quarter more often than others; with 7 or more items no difference was found.
    """

    size: int
    key: Key

    @classmethod
    def from_name(cls, size: int, *name: int | str) -> "Permutation":
        """Return the order whose key is derived from `name`."""
        return cls(size, stream_key(*name))

    def _items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        bits = max(2, (self.size - 1).bit_length())
        network = _Feistel(
            bits, draw_uint64(self.key, 0, _FEISTEL_ROUNDS), tabulated=len(positions) > 1 << (bits + 1) // 2
        )
        things = np.empty(len(positions), dtype=np.int64)
        for start in range(0, len(positions), _CHUNK_NUMBERS):
            part = network.permute(positions[start : start + _CHUNK_NUMBERS])
            outside = np.flatnonzero(part >= self.size)
            while len(outside):
                walked = network.permute(part[outside])
                part[outside] = walked
                outside = outside[walked >= self.size]
            things[start : start + _CHUNK_NUMBERS] = part
        return things


class _Feistel:
    """A bijection of `bits`-bit numbers. Each round XORs one half of a number with a hash of the other half.

    Args:
        round_keys: [rounds] uint64.
        tabulated: whether to hash all possible halves in advance, which is cheaper if many numbers are permuted.
    """

    def __init__(self, bits: int, round_keys: NDArray[np.uint64], *, tabulated: bool) -> None:
        self._low_bits = np.uint64(bits // 2)
        self._masks = tuple(np.uint64((1 << n) - 1) for n in (bits - bits // 2, bits // 2))
        self._keys = round_keys
        halves = np.arange(int(self._masks[0]) + 1, dtype=np.uint64) if tabulated else np.empty(0, np.uint64)
        self._tables = [
            (_hash_with_key(halves, key) & self._masks[index % 2]).astype(np.int64) if tabulated else None
            for index, key in enumerate(round_keys)
        ]

    def permute(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number to which each of `values` is mapped."""
        low_bits, low_mask = int(self._low_bits), int(self._masks[1])
        high, low = values >> low_bits, values & low_mask
        for index in range(len(self._keys)):
            if index % 2:
                low ^= self._hash_half(index, high)
            else:
                high ^= self._hash_half(index, low)
        high <<= low_bits
        high |= low
        return high

    def _hash_half(self, index: int, half: NDArray[np.int64]) -> NDArray[np.int64]:
        table = self._tables[index]
        if table is not None:
            # Indices are always in range, so "clip" changes nothing, but saves numpy's check.
            return table.take(half, mode="clip")
        mixed = _hash_with_key(half.astype(np.uint64), self._keys[index]) & self._masks[index % 2]
        return mixed.astype(np.int64)


def _hash_with_key(values: NDArray[np.uint64], round_key: np.uint64) -> NDArray[np.uint64]:
    """Return a hash of `values`: Stafford's 64-bit finaliser, variant 13 (SplitMix64's).

    On average an input bit flips half of the output bits.
    """
    mixed = values + round_key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@dataclass(frozen=True)
class LaneOrder(RowOrder):
    """The order of rows that are read in lanes.

    Attributes:
        size: a multiple of `lanes`.
        lanes: number of lanes; a step's rows are `lanes` consecutive positions.
        directions: 1, or 2 if each text gives two rows, read forward and backward.
    """

    size: int
    lanes: int
    directions: int

    def _items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        steps = self.size // self.lanes
        step, lane = np.divmod(positions, self.lanes)
        stretch, direction = np.divmod(lane, self.directions)
        step = np.where(direction == 1, steps - 1 - step, step)
        rows: NDArray[np.int64] = (stretch * steps + step) * self.directions + direction
        return rows


_GOLDEN_FRACTION = (3 - 5**0.5) / 2  # 0.38, the number whose multiples stay farthest from whole numbers


@dataclass(frozen=True)
class SpreadOrder(RowOrder):
    """A random order in which neighbours are far apart.

    The positions are cut into stretches of about the same length. Items whose numbers differ by d share a stretch only
    if d is a multiple of `stretches`.

    Attributes:
        stretches: number of stretches.
        name: parts of the key that seeds the random draws.
    """

    size: int
    stretches: int
    name: tuple[int | str, ...]

    def _items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        residues = self._residues()
        sizes = (self.size - residues + self.stretches - 1) // self.stretches
        starts = np.append(0, np.cumsum(sizes))
        stretch = np.searchsorted(starts, positions, side="right") - 1
        things = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(stretch).tolist():
            here, residue = stretch == number, int(residues[number])
            order = Permutation.from_name(int(sizes[number]), *self.name, residue)
            things[here] = order.items_at(positions[here] - starts[number]) * self.stretches + residue
        return things

    def _residues(self) -> NDArray[np.int64]:
        """Return [stretches] int64. Stretch k holds the items whose number modulo `stretches` is entry k."""
        first = int(draw_uint64(stream_key("stretches", *self.name), 0, 1)[0] % np.uint64(self.stretches))
        dealt = (first + _coprime_stride(self.stretches) * np.arange(self.stretches)) % self.stretches
        return np.argsort(dealt)


def _coprime_stride(stretches: int) -> int:
    """Return the number nearest to `_GOLDEN_FRACTION * stretches` that is coprime to `stretches`."""
    coprime = (n for n in range(1, stretches + 1) if gcd(n, stretches) == 1)
    return min(coprime, key=lambda n: abs(n - _GOLDEN_FRACTION * stretches))


@dataclass(frozen=True)
class SourceOrder(RowOrder):
    """An order of the rows of several sources in which each batch is of one source.

    The rows of source 0 come first in the numbering, then those of source 1, and so on.

    Attributes:
        size: number of all rows.
        sizes: numbers of rows of each source, multiples of `batch`.
        batch: number of consecutive positions, from 0 on, that are of one source.
        stretches: number of stretches within each source, as in `WindowSize`.
        name: parts of the key that seeds the random draws.
    """

    size: int
    sizes: tuple[int, ...]
    batch: int
    stretches: int
    name: tuple[int | str, ...]

    def _items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        turn, row = np.divmod(positions, self.batch)
        batches = Permutation.from_name(self.size // self.batch, "batches", *self.name).items_at(turn)
        ends = np.cumsum(self.sizes) // self.batch
        source = np.searchsorted(ends, batches, side="right")
        rows = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(source).tolist():
            here, size = source == number, self.sizes[number]
            start = int(ends[number]) * self.batch - size
            rows[here] = start + self._order_within_source(number).items_at(
                batches[here] * self.batch - start + row[here]
            )
        return rows

    def _order_within_source(self, source: int) -> Permutation | SpreadOrder:
        """Return the order of one source's rows: random, with neighbours spread if there is more than one stretch."""
        size, name = self.sizes[source], ("source", source, *self.name)
        stretches = min(self.stretches, size // self.batch)
        return SpreadOrder(size, stretches, name) if stretches > 1 else Permutation.from_name(size, *name)
