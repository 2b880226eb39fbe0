"""Writes a shard: a plain WebDataset tar with one sample per block. The same blocks always give the same bytes.

Also describes written shards compactly, and joins their descriptions into a block table.
"""

import hashlib
import io
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import DTYPES, BlockTable
from data_service.corpus.reader import UNIT_MEMBERS
from data_service.store.base import digest
from data_service.types import Block

_RECORD_BYTES = 10240  # archives are padded to a multiple of this size, tar's record
_BLOCK_DTYPE = np.dtype([(name, kind) for name, kind in DTYPES.items() if name != "shard"])  # one block


@dataclass(frozen=True)
class WrittenShard:
    """The description of a written shard. A build keeps all of them in memory, so a block takes only 75 bytes.

    Attributes:
        size: size of the shard in bytes.
        digest: blake2b hash (16 bytes, hex) of the whole shard.
        packed: base64 of one 56-byte record per block, in order.
    """

    size: int
    digest: str
    packed: str

    @property
    def blocks(self) -> NDArray[np.void]:
        """[B] records of the shard's blocks, with the columns of a block table except `shard`."""
        found: NDArray[np.void] = np.frombuffer(b64decode(self.packed), dtype=_BLOCK_DTYPE)
        return found


def concatenate_shard_tables(shards: Mapping[str, WrittenShard]) -> BlockTable:
    """Return the block table of shards, given by key, in order."""
    tables = [shard.blocks for shard in shards.values()]
    rows = np.concatenate([np.zeros(0, dtype=_BLOCK_DTYPE), *tables])
    columns: dict[str, NDArray[Any]] = {
        "shard": np.repeat(np.arange(len(tables), dtype=DTYPES["shard"]), list(map(len, tables)))
    }
    columns |= {name: np.ascontiguousarray(rows[name]) for name in DTYPES if name != "shard"}
    return BlockTable(len(rows), tuple(shards), columns)


class ShardWriter:
    """A writer of blocks to a new tar file at `path`, with sample keys `<name>-00000`, `<name>-00001`, ..."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = path.open("wb")
        self._name = name
        self._hash = hashlib.blake2b(digest_size=16)
        self._offset = 0
        self._blocks: list[tuple[int, int, int, int, int, bytes]] = []  # records of `_BLOCK_DTYPE`

    def write(self, block: Block) -> None:
        """Append one block. Raises OSError: the disk is full."""
        data = _tar_sample(f"{self._name}-{len(self._blocks):05d}", block)
        counts = (len(block.tokens), len(block.sentences) - 1, len(block.documents) - 1)
        self._blocks.append((self._offset, len(data), *counts, bytes.fromhex(digest(data))))
        self._append(data)

    def finish(self) -> WrittenShard:
        """Write the end of the archive and close the file; return the shard's description."""
        end = self._offset + 1024  # an archive ends with 1024 zero bytes
        self._append(bytes(-(-end // _RECORD_BYTES) * _RECORD_BYTES - self._offset))
        self._file.close()
        packed = b64encode(np.array(self._blocks, dtype=_BLOCK_DTYPE).tobytes()).decode()
        return WrittenShard(self._offset, self._hash.hexdigest(), packed)

    def close(self) -> None:
        """Close the file, whether `finish` was called or not."""
        self._file.close()

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


def _tar_sample(key: str, block: Block) -> memoryview:
    """Return a block as tar bytes: one member per array, without the bytes that end an archive."""
    arrays = {
        "tokens.npy": block.tokens,
        "sentences.npy": block.sentences,
        "documents.npy": block.documents,
    } | {UNIT_MEMBERS[level]: bits for level, bits in block.units.items()}
    sample = io.BytesIO()
    for name in sorted(arrays):
        content = io.BytesIO()
        np.save(content, arrays[name])
        member = tarfile.TarInfo(f"{key}.{name}")
        member.size, member.mode, member.uname, member.gname = content.tell(), 0o444, "maskfleet", "maskfleet"
        sample.write(member.tobuf(tarfile.USTAR_FORMAT))
        sample.write(content.getbuffer())
        sample.write(bytes(-member.size % tarfile.BLOCKSIZE))
    return sample.getbuffer()
