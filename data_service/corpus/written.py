"""Shards that tasks of a build have written, as their receipts describe them, and the block table of all."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.manifest import DTYPES, BlockTable

_INTEGER_COLUMNS = ("offset", "length", "tokens", "sentences", "documents")


@dataclass(frozen=True)
class WrittenBlock:
    """A block that was written: bytes [offset, offset + length) of its shard.

    Attributes:
        offset, length: place in the shard, in bytes.
        tokens, sentences, documents: counts.
        digest: blake2b hash of its bytes (16 bytes, hex).
    """

    offset: int
    length: int
    tokens: int
    sentences: int
    documents: int
    digest: str


_BLOCK_ROW_DTYPE = np.dtype([(name, "<i8") for name in _INTEGER_COLUMNS] + [("digest", "V16")])


@dataclass(frozen=True)
class WrittenShard:
    """A shard that was written. A build holds all of them, so their blocks are packed: 75 bytes each, not 600.

    Attributes:
        size: in bytes.
        digest: hash of all its bytes.
        packed: its blocks in order, 56 bytes each, in base64.
    """

    size: int
    digest: str
    packed: str

    @classmethod
    def from_blocks(cls, size: int, digest: str, blocks: Sequence[WrittenBlock]) -> "WrittenShard":
        """Return the shard of these blocks, in order."""
        table = np.zeros(len(blocks), dtype=_BLOCK_ROW_DTYPE)
        for name in _INTEGER_COLUMNS:
            table[name] = [getattr(block, name) for block in blocks]
        table["digest"] = [np.void(bytes.fromhex(block.digest)) for block in blocks]
        return cls(size, digest, b64encode(table.tobytes()).decode())

    @property
    def block_records(self) -> NDArray[np.void]:
        """[B] records with the fields of `WrittenBlock`; digests as 16 bytes."""
        found: NDArray[np.void] = np.frombuffer(b64decode(self.packed), dtype=_BLOCK_ROW_DTYPE)
        return found

    @property
    def blocks(self) -> tuple[WrittenBlock, ...]:
        """Its blocks in order."""
        return tuple(
            WrittenBlock(**{name: int(row[name]) for name in _INTEGER_COLUMNS}, digest=row["digest"].tobytes().hex())
            for row in self.block_records
        )


def concatenate_shard_tables(shards: Mapping[str, WrittenShard]) -> BlockTable:
    """Return the table of the blocks of shards, by key, in order."""
    tables = [shard.block_records for shard in shards.values()]
    rows = np.concatenate([np.zeros(0, dtype=_BLOCK_ROW_DTYPE), *tables])
    columns: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(rows[name], dtype=DTYPES[name]) for name in (*_INTEGER_COLUMNS, "digest")
    }
    columns["shard"] = np.repeat(np.arange(len(tables), dtype=DTYPES["shard"]), list(map(len, tables)))
    return BlockTable(len(rows), tuple(shards), {name: columns[name] for name in DTYPES})
