"""Writes a shard: a plain WebDataset tar with one sample per block. The same blocks always give the same bytes."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np

from data_service.corpus.reader import UNIT_MEMBERS
from data_service.corpus.written import WrittenBlock, WrittenShard
from data_service.store.base import digest
from data_service.types import Block

_RECORD_BYTES = 10240  # a tar archive is padded to a multiple of this size


class ShardWriter:
    """A writer that appends blocks to a new tar file at `path`. Keys are `<name>-00000`, `<name>-00001`, ..."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = path.open("wb")
        self._name = name
        self._hash = hashlib.blake2b(digest_size=16)
        self._offset = 0
        self._blocks: list[WrittenBlock] = []

    def write(self, block: Block) -> None:
        """Append one block. Raises OSError: the disk is full."""
        data = _tar_sample(f"{self._name}-{len(self._blocks):05d}", block)
        self._blocks.append(
            WrittenBlock(
                offset=self._offset,
                length=len(data),
                tokens=len(block.tokens),
                sentences=len(block.sentences) - 1,
                documents=len(block.documents) - 1,
                digest=digest(data),
            )
        )
        self._append(data)

    def finish(self) -> WrittenShard:
        """Write the end of the archive and close the file; return its description. Then the file is complete."""
        end = self._offset + 1024  # two zero blocks end an archive
        self._append(bytes(-(-end // _RECORD_BYTES) * _RECORD_BYTES - self._offset))
        self._file.close()
        return WrittenShard.from_blocks(self._offset, self._hash.hexdigest(), self._blocks)

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)


def _tar_sample(key: str, block: Block) -> memoryview:
    """Return one sample as tar bytes without the archive's end. Such samples, one after another, form an archive."""
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
