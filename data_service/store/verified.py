"""Reads that check what they read, so that a bad copy on the way costs a second read, not a run."""

from collections.abc import Iterable
from hashlib import blake2b

from data_service.store.base import Store

ATTEMPTS = 4


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal: the hash of everything Maskfleet stores."""
    return blake2b(data, digest_size=16).hexdigest()


def chunk_digests(buffers: Iterable[memoryview], chunk: int) -> tuple[str, ...]:
    """The digests of `buffers`, laid end to end and cut every `chunk` bytes; the last piece may be shorter."""
    found, current, room = [], blake2b(digest_size=16), chunk
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            part, rest = rest[:room], rest[room:]
            current.update(part)
            room -= len(part)
            if room == 0:
                found.append(current.hexdigest())
                current, room = blake2b(digest_size=16), chunk
    return (*found, current.hexdigest()) if room < chunk else tuple(found)


def read_verified(
    store: Store, key: str, start: int, length: int, expected: str, otherwise: Exception
) -> bytes:
    """`length` bytes of the object from byte `start`, whose digest is `expected`.

    A mismatch is read again a few times, for damage on the way; damage at rest stays.

    Raises:
        `otherwise`: every attempt read other bytes.
        StoreError: KeyMissing, Truncated and the rest, as `Store.get_range`.
    """
    for _ in range(ATTEMPTS):
        data = store.get_range(key, start, length)
        if digest(data) == expected:
            return data
    raise otherwise
