"""Reads a block of a corpus with one ranged request and one hash. Needs only the standard library and NumPy.

Arrays are views into the bytes that were read, never copies. So a block of 1 M tokens (2 MB) takes about a millisecond
besides the request.
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

_TAR_HEADER_BYTES = 512
# The header that numpy.save writes for a one-dimensional array of integers. NumPy's own parser uses `ast`, which before
# CPython 3.11.8 may fail at random in several threads (python/cpython issue 106905).
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<][iu]\d)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)
_TOKENS, _SENTENCES, _DOCUMENTS = "tokens.npy", "sentences.npy", "documents.npy"  # members of every block's tar sample
UNIT_MEMBERS: Mapping[Level, str] = {"word": "words.npy", "phrase": "phrases.npy", "entity": "entities.npy"}
"""Tar members of a block that mark the tokens at which words, phrases and entities begin, if the build stored them."""


def read_block(store: Store, table: BlockTable, index: int) -> Block:
    """Return block `index` of a split as read-only views of verified bytes. `store`: the store at the corpus root.

    Raises:
        CorruptBlock: the stored bytes do not match the manifest's hash, even when they are read again.
        KeyMissing: the shard does not exist.
        Truncated: the shard ends before the block does.
        StoreError: the store cannot be read.
    """
    return parse_listed_block(read_block_bytes(store, table, index), store, table, index)


def read_block_bytes(store: Store, table: BlockTable, index: int) -> bytes:
    """Return the verified bytes of a block, which are one tar sample. Raises as `read_block`."""
    start, length, expected = int(table.offset[index]), int(table.length[index]), table.digest[index]
    mismatch = _corrupt(_block_location(store, table, index), "its bytes do not match the manifest's hash")
    return read_verified(
        store,
        table.block_shard_key(index),
        start=start,
        length=length,
        expected=expected,
        error_on_mismatch=mismatch,
    )


def parse_listed_block(data: bytes, store: Store, table: BlockTable, index: int) -> Block:
    """Return block `index` from its verified bytes. Raises CorruptBlock: not a block, or not of the size in `table`."""
    place = _block_location(store, table, index)
    block = parse_block(data, place)
    found = (len(block.tokens), len(block.sentences) - 1, len(block.documents) - 1)
    listed = (int(table.tokens[index]), int(table.sentences[index]), int(table.documents[index]))
    if found != listed:
        raise _corrupt(place, f"it holds {found} tokens, sentences and documents, but the manifest says {listed}")
    return block


def parse_block(data: bytes, place: str) -> Block:
    """Return the block in the bytes of one tar sample, as views of `data`. `place`: the block's name in errors.

    Raises:
        CorruptBlock: the bytes are not a block.
    """
    try:
        members = {name.partition(".")[2]: _parse_npy(body) for name, body in _tar_members(memoryview(data))}
        tokens, sentences, documents = members[_TOKENS], members[_SENTENCES], members[_DOCUMENTS]
    except (tarfile.HeaderError, ValueError, KeyError) as error:
        raise _corrupt(place, f"the bytes are not a block ({error!r})") from error
    if tokens.dtype not in (np.uint16, np.uint32) or sentences.dtype != np.int64 or documents.dtype != np.int64:
        raise _corrupt(place, f"the block's arrays have dtypes {tokens.dtype}, {sentences.dtype}, {documents.dtype}")
    if not (_are_valid_boundaries(sentences, len(tokens)) and _are_valid_boundaries(documents, len(sentences) - 1)):
        raise _corrupt(place, "the boundaries of sentences or documents do not fit the block's tokens")
    units = {level: members[UNIT_MEMBERS[level]] for level in LEVELS if UNIT_MEMBERS[level] in members}
    if any(bits.dtype != np.uint8 or len(bits) != -(-len(tokens) // 8) for bits in units.values()):
        raise _corrupt(place, "a mask of word, phrase or entity starts does not have one bit per token")
    return Block(tokens, sentences, documents, units)


def _tar_members(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield (name, content) of each member of a tar sample."""
    start = 0
    while start < len(data):
        member = tarfile.TarInfo.frombuf(bytes(data[start : start + _TAR_HEADER_BYTES]), "utf-8", "strict")
        start += _TAR_HEADER_BYTES
        yield member.name, data[start : start + member.size]
        start += -(-member.size // _TAR_HEADER_BYTES) * _TAR_HEADER_BYTES


def _parse_npy(body: memoryview) -> NDArray[Any]:
    header = _NPY_HEADER.match(body)
    if header is None:
        raise ValueError(f"a tar member is not a one-dimensional array of integers: {bytes(body[:80])!r}")
    kind, count = header.groups()
    return np.frombuffer(body, dtype=np.dtype(kind.decode()), count=int(count), offset=header.end())


def _are_valid_boundaries(boundaries: NDArray[np.int64], end: int) -> bool:
    """Return whether `boundaries` begin with 0, end with `end` and strictly ascend."""
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != end:
        return False
    return bool((boundaries[1:] > boundaries[:-1]).all())


def _block_location(store: Store, table: BlockTable, index: int) -> str:
    return f"{store.uri.rstrip('/')}/{table.block_location(index)}"


def _corrupt(place: str, problem: str) -> CorruptBlock:
    return CorruptBlock(
        f"{place}: {problem}",
        remedy="restore the shard from a copy, or build the corpus again into an empty folder; "
        "`maskfleet corpus verify` lists all damage",
    )
