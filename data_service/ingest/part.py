"""One part of a split, training or held-out: documents become blocks, blocks a shard in a local file."""

from pathlib import Path
from types import TracebackType

import numpy as np
from pydantic import BaseModel, ConfigDict

from data_service.corpus.manifest import WrittenShard
from data_service.corpus.writer import ShardWriter
from data_service.ingest.blocks import BlockBuilder, Encoded

LENGTHS = 40  # powers of two that a document's length in tokens can reach


class PartSummary(BaseModel):
    """What a part holds.

    Attributes:
        shard: None where the part has no document.
        text_bytes: UTF-8 bytes of its documents' text.
        lengths: entry k counts its documents of 2**k to 2**(k + 1) - 1 tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: WrittenShard | None
    text_bytes: int
    lengths: list[int]


class Part:
    """Writes the blocks of one part to `path`, which comes into being with the first of them.

    `unigram` is the [vocab_size] int64 count of its tokens.
    """

    def __init__(self, path: Path, name: str, vocab_size: int, block_tokens: int) -> None:
        self.path = path
        self.unigram = np.zeros(vocab_size, dtype=np.int64)
        self._name = name
        self._block_tokens = block_tokens
        self._builder = BlockBuilder()
        self._writer: ShardWriter | None = None
        self._text_bytes = 0
        self._lengths = [0] * LENGTHS

    def __enter__(self) -> "Part":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, document: Encoded, text_bytes: int) -> None:
        """Append a document of at least one token. A document longer than a block gets a block of its own."""
        if self._builder.tokens and self._builder.tokens + len(document.tokens) > self._block_tokens:
            self._write_block()
        self._builder.add(document)
        self._text_bytes += text_bytes
        self._lengths[len(document.tokens).bit_length() - 1] += 1

    def finish(self) -> PartSummary:
        """Write what is left and end the shard."""
        if self._builder.tokens:
            self._write_block()
        shard = self._writer.finish() if self._writer is not None else None
        return PartSummary(shard=shard, text_bytes=self._text_bytes, lengths=self._lengths)

    def _write_block(self) -> None:
        block = self._builder.take()
        if self._writer is None:
            self._writer = ShardWriter(self.path, self._name)
        self._writer.write(block)
        self.unigram += np.bincount(block.tokens, minlength=len(self.unigram))
