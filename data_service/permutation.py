"""A random order of any number of things as a function: constant memory, and a seek costs nothing.

A Feistel network permutes the smallest power of two that holds the domain; results outside it are permuted
again until they fall inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). Fewer than two rounds of walking are needed on average.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, draws64, stream_key

_ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """The order of `size` things that `key` names: position `i` holds thing `at(i)`."""

    size: int
    key: Key

    @classmethod
    def of(cls, size: int, *name: int | str) -> "Permutation":
        return cls(size, stream_key(*name))

    def at(self, position: int) -> int:
        return int(self.many(np.array([position]))[0])

    def many(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] int64 things at `positions`, each in [0, size). Raises IndexError for a position outside."""
        check_positions(positions, self.size)
        bits = max(2, (self.size - 1).bit_length())
        round_keys = draws64(self.key, 0, _ROUNDS)
        things = _feistel(positions.astype(np.uint64), bits, round_keys)
        outside = np.flatnonzero(things >= self.size)
        while len(outside):
            walked = _feistel(things[outside], bits, round_keys)
            things[outside] = walked
            outside = outside[walked >= self.size]
        return things.astype(np.int64)


def check_positions(positions: NDArray[np.int64], size: int) -> None:
    """Raises IndexError unless all positions are in [0, size)."""
    if len(positions) and not (positions.min() >= 0 and positions.max() < size):
        raise IndexError(f"positions {positions.min()}..{positions.max()} outside a permutation of {size}")


def _feistel(values: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection on `bits`-bit values: each round XORs one half with a hash of the other."""
    low_bits = np.uint64(bits // 2)
    high_mask, low_mask = (np.uint64((1 << n) - 1) for n in (bits - bits // 2, bits // 2))
    high, low = values >> low_bits, values & low_mask
    for index, round_key in enumerate(round_keys):
        if index % 2:
            low = low ^ (_mix(high, round_key) & low_mask)
        else:
            high = high ^ (_mix(low, round_key) & high_mask)
    return (high << low_bits) | low


def _mix(values: NDArray[np.uint64], round_key: np.uint64) -> NDArray[np.uint64]:
    """Stafford's 64-bit finaliser, variant 13 (SplitMix64's): an input bit flips half of the output bits."""
    mixed = values + round_key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
