"""The corpus manifest: what exists, where, and the hash of every block. Written last; without it there is no corpus."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class BlockTable:
    """One split's B blocks, a column per attribute (a 40-billion-token corpus has tens of thousands of rows).

    Attributes:
        shard: [B] int32, index into `shards`.
        offset: [B] int64, byte offset of the block's first tar header in its shard.
        length: [B] int64, bytes from there to the end of the block's last tar member (padding included).
        tokens, sentences, documents: [B] int64 counts.
        digest: B hex digests (blake2b, 16 bytes) of those `length` bytes.
        shards: shard keys relative to the corpus root.
    """

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    digest: tuple[str, ...]
    shards: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True)
class Manifest:
    """A complete corpus.

    Attributes:
        tokenizer_hash: hash of the tokenizer that made the tokens (`Tokenizer.hash`).
        vocab_size: number of ids of that tokenizer.
        heldout_fraction: share of documents (by document hash) in the held-out split.
        train, heldout: the blocks of each split.
        unigram: [vocab_size] int64, token counts of the training split.
        shard_sizes, shard_digests: whole-file size and hash per shard key, so that any flipped byte is found.
        counts: documents read, duplicates dropped and the like, for `corpus stats`.
        options: how the corpus was built (inputs, options), for the record and for continuing.
    """

    tokenizer_hash: str
    vocab_size: int
    heldout_fraction: float
    train: BlockTable
    heldout: BlockTable
    unigram: NDArray[np.int64]
    shard_sizes: dict[str, int]
    shard_digests: dict[str, str]
    counts: dict[str, int]
    options: dict[str, object]
