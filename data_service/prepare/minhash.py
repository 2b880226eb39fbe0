"""MinHash signatures of texts, and how they are cut into bands (Broder 1997; Leskovec, Rajaraman and Ullman,
*Mining of Massive Datasets*, chapter 3).

Two texts have equal minima under one hash function with the probability of their Jaccard similarity s, the share of
their shingles that both have. A band joins `rows` minima; texts with an equal band are candidates. So a pair is a
candidate with the probability 1 - (1 - s**rows)**bands. A sketch of one bit of each minimum estimates s itself (Li and
König, *b-Bit Minwise Hashing*, 2010): equal bits are a share (1 + s) / 2 of all.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from data_service.prepare.shingles import hash_shingles

HASH_COUNT = 128
SKETCH_BYTES = HASH_COUNT // 8  # size of a sketch in bytes: one bit of each hash
_TARGET_RECALL = 0.99  # share of pairs with the requested similarity that the bands must find
_MAX_DEVIATIONS = 2.5  # standard deviations by which a pair's equal bits may be below their expected number
_CHUNK_SHINGLES = 256  # shingles that are hashed at a time: the products stay in a core's cache
_MIX_FACTOR = np.uint32(0x9E3779B1)


@dataclass(frozen=True)
class BandSettings:
    """How signatures are cut. `count` bands of `rows` minima; `least_equal`: equal bits of two sketches that count as
    similar."""

    count: int
    rows: int
    least_equal: int


def choose_bands(similarity: float) -> BandSettings:
    """Return the longest bands that find 99 % of all pairs of a Jaccard similarity, of at most `HASH_COUNT` minima."""
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
    """A text's signature. `minima`: [HASHES] uint32."""

    minima: NDArray[np.uint32]

    def band_keys(self, bands: BandSettings) -> NDArray[np.uint64]:
        """Return [bands.count] hashes of the bands."""
        cut = self.minima[: bands.count * bands.rows].reshape(bands.count, bands.rows).astype(np.uint64)
        found = np.zeros(bands.count, dtype=np.uint64)
        for row in range(bands.rows):
            found = (found + cut[:, row] + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
            found ^= found >> np.uint64(32)
        return found

    def digest(self) -> bytes:
        """Return the blake2b hash of the minima, 16 bytes."""
        return blake2b(self.minima.tobytes(), digest_size=16).digest()

    def sketch(self) -> NDArray[np.uint8]:
        """Return [SKETCH] uint8: one bit of each minimum."""
        return np.packbits((self.minima * _MIX_FACTOR >> np.uint32(31)).astype(np.bool_))


def compute_signature(text: str, words_per_shingle: int) -> Signature:
    """Return the signature of a text, of its shingles of `words_per_shingle` units."""
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
    """Return ([HASHES] masks, [HASHES] odd factors) of the hash functions, which permute 32-bit numbers."""
    drawn = np.random.Generator(np.random.Philox(key=29)).integers(0, 2**32, (2, HASH_COUNT), dtype=np.uint32)
    return drawn[0], drawn[1] | np.uint32(1)
