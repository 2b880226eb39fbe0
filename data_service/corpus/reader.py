"""Reads blocks by range, with one request and one hash each. Standard library and NumPy only.

Arrays are views into the bytes that were read, never copies. A block of 1 M tokens costs its request and its hash,
about a millisecond for 2 MB.
"""

import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import BlockTable
from data_service.errors import CorruptBlock
from data_service.store.base import Store, read_verified
from data_service.types import LEVELS, Block, Level

_HEADER = 512
# Version 1.0, as numpy.save writes a one-dimensional array. NumPy's own parser uses `ast`, which before CPython 3.11.8
# may fail at random where blocks are read in several threads (python/cpython issue 106905).
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<][iu]\d)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)
_TOKENS, _SENTENCES, _DOCUMENTS = "tokens.npy", "sentences.npy", "documents.npy"
MEMBERS: Mapping[Level, str] = {"word": "words.npy", "phrase": "phrases.npy", "entity": "entities.npy"}
"""The members of a block that say where units begin, where they were stored."""


def read_block(store: Store, table: BlockTable, index: int) -> Block:
    """Block `index` of a split as read-only views of verified bytes. `store` is rooted at the corpus.

    Raises:
        CorruptBlock: the stored bytes do not match the manifest's hash, however often they are read.
        KeyMissing, Truncated, StoreError: the shard is gone, cut short, or cannot be reached.
    """
    return to_block(read_block_bytes(store, table, index), store, table, index)


def read_block_bytes(store: Store, table: BlockTable, index: int) -> bytes:
    """The block's bytes in its shard: one tar sample. Raises as `read_block`."""
    start, length, expected = int(table.offset[index]), int(table.length[index]), table.digest[index]
    mismatch = _corrupt(_place(store, table, index), "its bytes do not match the manifest's hash")
    return read_verified(
        store, table.key(index), start=start, length=length, expected=expected, otherwise=mismatch
    )


def to_block(data: bytes, store: Store, table: BlockTable, index: int) -> Block:
    """The block in its verified bytes. Raises CorruptBlock if they are not the block that the table lists."""
    place = _place(store, table, index)
    block = parse_block(data, place)
    found = (len(block.tokens), len(block.sentences) - 1, len(block.documents) - 1)
    listed = (int(table.tokens[index]), int(table.sentences[index]), int(table.documents[index]))
    if found != listed:
        raise _corrupt(place, f"it holds {found} tokens, sentences and documents, the manifest says {listed}")
    return block


def parse_block(data: bytes, place: str) -> Block:
    """The block in the bytes of one tar sample, as views of `data`; `place` names it in messages.

    Raises:
        CorruptBlock: these bytes are not a block.
    """
    try:
        members = {name.partition(".")[2]: _parse_npy(body) for name, body in _members(memoryview(data))}
        tokens, sentences, documents = members[_TOKENS], members[_SENTENCES], members[_DOCUMENTS]
    except (tarfile.HeaderError, ValueError, KeyError) as error:
        raise _corrupt(place, f"it is not a block ({error!r})") from error
    if (
        tokens.dtype not in (np.uint16, np.uint32)
        or sentences.dtype != np.int64
        or documents.dtype != np.int64
    ):
        raise _corrupt(place, f"it has types {tokens.dtype}, {sentences.dtype}, {documents.dtype}")
    if not (_cuts(sentences, len(tokens)) and _cuts(documents, len(sentences) - 1)):
        raise _corrupt(place, "its boundaries are not those of its tokens")
    units = {level: members[MEMBERS[level]] for level in LEVELS if MEMBERS[level] in members}
    if any(bits.dtype != np.uint8 or len(bits) != -(-len(tokens) // 8) for bits in units.values()):
        raise _corrupt(place, "its units are not a bit for each of its tokens")
    return Block(tokens, sentences, documents, units)


def _members(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    start = 0
    while start < len(data):
        member = tarfile.TarInfo.frombuf(bytes(data[start : start + _HEADER]), "utf-8", "strict")
        start += _HEADER
        yield member.name, data[start : start + member.size]
        start += -(-member.size // _HEADER) * _HEADER


def _parse_npy(body: memoryview) -> NDArray[Any]:
    header = _NPY_HEADER.match(body)
    if header is None:
        raise ValueError(f"not a one-dimensional array of integers: {bytes(body[:80])!r}")
    kind, count = header.groups()
    return np.frombuffer(body, dtype=np.dtype(kind.decode()), count=int(count), offset=header.end())


def _cuts(boundaries: NDArray[np.int64], end: int) -> bool:
    """Whether `boundaries` cut 0..end into pieces, none of them empty."""
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != end:
        return False
    return bool((boundaries[1:] > boundaries[:-1]).all())


def _place(store: Store, table: BlockTable, index: int) -> str:
    return f"{store.uri.rstrip('/')}/{table.place(index)}"


def _corrupt(place: str, problem: str) -> CorruptBlock:
    return CorruptBlock(
        f"{place}: {problem}",
        remedy="restore the shard from a copy, or build the corpus again into an empty folder; "
        "`maskfleet corpus verify` lists all that is damaged",
    )
