"""Keyed random streams: a draw is a function of its key and its index, so no random state is ever saved.

A stream is Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in
counter mode. Its 128-bit key is a BLAKE2b hash of the purpose of the draw, so streams of neighbouring seeds, epochs and
blocks are independent. Only the bit generator's raw output is used, which NumPy promises never to change.
"""

import hashlib
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Key = NewType("Key", bytes)  # 128-bit key of a random stream (`stream_key`)

UINT32_RANGE = 1 << 32
"""Number of values of a 32-bit draw."""

_WORDS_PER_COUNT = 4  # Philox4x64 makes four 64-bit words from one counter value


def stream_key(*parts: int | str) -> Key:
    """Return the 128-bit key of the stream named by `parts`. Other values or types of parts give independent
    streams."""
    digest = hashlib.blake2b(digest_size=16, person=b"maskfleet-rng")
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return Key(digest.digest())


def draw_uint64(key: Key, start: int, stop: int) -> NDArray[np.uint64]:
    """Return draws `start` to `stop` of the stream, uniform over 64 bits. The cost is proportional to their number."""
    first_count, skip = divmod(start, _WORDS_PER_COUNT)
    philox = np.random.Philox(key=np.frombuffer(key, dtype="<u8"), counter=first_count)
    words: NDArray[np.uint64] = philox.random_raw(skip + stop - start)
    return words[skip:]


def draw_uint32(key: Key, start: int, stop: int) -> NDArray[np.uint32]:
    """Return 32-bit draws `start` to `stop` of the stream, uniform. Two of them are the halves of one 64-bit draw."""
    first_word = start // 2
    words = draw_uint64(key, first_word, (stop + 1) // 2)
    halves: NDArray[np.uint32] = words.astype("<u8", copy=False).view("<u4")
    return halves[start - 2 * first_word : stop - 2 * first_word]


def scale_draws(draws: NDArray[np.uint32], bounds: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return uniform integers below `bounds` from 32-bit draws, by multiply and shift (bias at most bounds / 2**32)."""
    wide = draws.astype(np.uint64)
    wide *= np.asarray(bounds).astype(np.uint64)
    wide >>= np.uint64(32)
    return wide.view(np.int64)
