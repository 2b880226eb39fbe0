"""MinHash signatures of texts, and how they are cut into bands (Broder 1997; Leskovec, Rajaraman and Ullman,
*Mining of Massive Datasets*, chapter 3).

A signature holds, for each of `HASH_COUNT` hash functions, the minimum hash of the text's shingles. Two texts have the
same minimum with the probability s, their Jaccard similarity (shared shingles / all shingles). A band joins `rows`
minima; texts with an equal band are candidates, with the probability 1 - (1 - s**rows)**bands. A sketch holds one bit
of each minimum and estimates s (Li and König, *b-Bit Minwise Hashing*, 2010): the share of equal bits is (1 + s) / 2.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from data_service.prepare.shingles import hash_shingles

HASH_COUNT = 128  # number of hash functions, and of minima in a signature
SKETCH_BYTES = HASH_COUNT // 8  # size of a sketch: one bit of each minimum
_TARGET_RECALL = 0.99  # share of pairs with the requested similarity that must become candidates
_MAX_DEVIATIONS = 2.5  # standard deviations by which a similar pair may have fewer equal bits than expected
_CHUNK_SHINGLES = 256  # shingles hashed at a time: the products fit in a core's cache
_MIX_FACTOR = np.uint32(0x9E3779B1)  # prime near 2**32 / golden ratio: mixes a minimum into its highest bit


@dataclass(frozen=True)
class BandSettings:
    """How signatures are cut: into `count` bands of `rows` minima. `least_equal`: least number of equal bits in the
    sketches of a similar pair."""

    count: int
    rows: int
    least_equal: int


def choose_bands(similarity: float) -> BandSettings:
    """Return the bands with the most rows that find 99 % of all pairs with this Jaccard similarity."""
    fits = [
        rows
        for rows in range(1, HASH_COUNT + 1)
        if 1 - (1 - similarity**rows) ** (HASH_COUNT // rows) >= _TARGET_RECALL
    ]
    rows = max(fits, default=1)
    equal = (1 + similarity) / 2
    spread = math.sqrt(equal * (1 - equal) * HASH_COUNT)
    return BandSettings(HASH_COUNT // rows, rows, math.ceil(equal * HASH_COUNT - _MAX_DEVIATIONS * spread))


@dataclass(frozen=True)
class Signature:
    """The MinHash signature of a text. `minima`: [HASH_COUNT] uint32."""

    minima: NDArray[np.uint32]

    def band_keys(self, bands: BandSettings) -> NDArray[np.uint64]:
        """Return [bands.count]: a hash of each band."""
        cut = self.minima[: bands.count * bands.rows].reshape(bands.count, bands.rows).astype(np.uint64)
        found = np.zeros(bands.count, dtype=np.uint64)
        for row in range(bands.rows):
            found = (found + cut[:, row] + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
            found ^= found >> np.uint64(32)
        return found

    def digest(self) -> bytes:
        """Return the BLAKE2b hash of the minima, 16 bytes."""
        return blake2b(self.minima.tobytes(), digest_size=16).digest()

    def sketch(self) -> NDArray[np.uint8]:
        """Return the sketch, [SKETCH_BYTES] uint8: one mixed bit of each minimum."""
        return np.packbits((self.minima * _MIX_FACTOR >> np.uint32(31)).astype(np.bool_))


def compute_signature(text: str, words_per_shingle: int) -> Signature:
    """Return the signature of a text's shingles; a shingle has `words_per_shingle` units."""
    found = (hash_shingles(text, words_per_shingle) >> np.uint64(32)).astype(np.uint32)
    masks, factors = _hash_function_coefficients()
    minima = np.full(HASH_COUNT, np.uint32(2**32 - 1))
    for start in range(0, len(found), _CHUNK_SHINGLES):
        part = found[start : start + _CHUNK_SHINGLES, None] ^ masks
        part *= factors
        np.minimum(minima, part.min(axis=0), out=minima)
    return Signature(minima)


@lru_cache(maxsize=1)
def _hash_function_coefficients() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return HASH_COUNT masks and HASH_COUNT odd factors. Each hash function, (x ^ mask) * factor, permutes uint32."""
    drawn = np.random.Generator(np.random.Philox(key=29)).integers(0, 2**32, (2, HASH_COUNT), dtype=np.uint32)
    return drawn[0], drawn[1] | np.uint32(1)
