"""Corpora for measurements: random text in real shards, and the manifest of a corpus that has no data."""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.block import Block
from data_service.corpus.manifest import BlockTable, Manifest, block_table
from data_service.corpus.manifest_file import save_manifest
from data_service.corpus.writer import ShardWriter
from data_service.store.base import Store
from data_service.tokenizers.specials import SpecialIds

VOCABULARY = 50_265
SPECIAL = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)
NEVER_MASKED = (0, 1, 2, 3, 4)
BLOCK_TOKENS = 1_000_000

_SENTENCE, _DOCUMENT = 24, 26  # mean tokens in a sentence, sentences in a document: English prose
_BLOCKS_PER_SHARD = 16


def random_block(seed: int, tokens: int = BLOCK_TOKENS) -> Block:
    """A block of uniformly random ordinary tokens, its sentences and documents as long as English ones."""
    rng = np.random.default_rng(seed)
    text = rng.integers(len(NEVER_MASKED), VOCABULARY, tokens).astype(np.uint16)
    sentences = _boundaries(rng, tokens, _SENTENCE)
    return Block(text, sentences, _boundaries(rng, len(sentences) - 1, _DOCUMENT))


def write_corpus(store: Store, blocks: int) -> Manifest:
    """Write `blocks` random blocks as a corpus at the store's root."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    digests: list[str] = []
    shards: list[str] = []
    sizes: dict[str, int] = {}
    shard_digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder:
        for first in range(0, blocks, _BLOCKS_PER_SHARD):
            path, key = Path(folder) / "shard.tar", f"train/{len(shards):06d}.tar"
            writer = ShardWriter(path, f"{len(shards):06d}")
            for seed in range(first, min(first + _BLOCKS_PER_SHARD, blocks)):
                writer.write(random_block(seed))
            written = writer.finish()
            store.put_file(key, path)
            rows += [
                (len(shards), b.offset, b.length, b.tokens, b.sentences, b.documents) for b in written.blocks
            ]
            digests += [b.digest for b in written.blocks]
            sizes[key], shard_digests[key] = written.size, written.digest
            shards.append(key)
    manifest = _manifest(block_table(rows, digests, shards), sizes, shard_digests)
    save_manifest(store, manifest)
    return manifest


def synthetic_manifest(tokens: int) -> Manifest:
    """The manifest of a corpus of so many tokens in blocks of a million. There is nothing behind it."""
    blocks = -(-tokens // BLOCK_TOKENS)
    length = 2 * BLOCK_TOKENS + 8 * BLOCK_TOKENS // _SENTENCE + 4096
    sentences, documents = BLOCK_TOKENS // _SENTENCE, BLOCK_TOKENS // _SENTENCE // _DOCUMENT
    rows = [
        (n // _BLOCKS_PER_SHARD, n % _BLOCKS_PER_SHARD * length, length, BLOCK_TOKENS, sentences, documents)
        for n in range(blocks)
    ]
    shards = [f"train/{n:06d}.tar" for n in range(-(-blocks // _BLOCKS_PER_SHARD))]
    sizes = dict.fromkeys(shards, _BLOCKS_PER_SHARD * length)
    digests = [f"{n:032x}" for n in range(blocks)]
    return _manifest(block_table(rows, digests, shards), sizes, dict.fromkeys(shards, "0" * 32))


def _manifest(table: BlockTable, sizes: dict[str, int], digests: dict[str, str]) -> Manifest:
    return Manifest(
        tokenizer_hash="0" * 64,
        vocab_size=VOCABULARY,
        heldout_fraction=0.0,
        train=table,
        heldout=block_table([], [], []),
        unigram=np.zeros(VOCABULARY, dtype=np.int64),
        shard_sizes=sizes,
        shard_digests=digests,
        counts={},
        options={},
    )


def _boundaries(rng: np.random.Generator, end: int, mean: float) -> NDArray[np.int64]:
    cuts = np.cumsum(rng.geometric(1 / mean, size=round(2 * end / mean) + 100))
    return np.concatenate([[0], cuts[cuts < end], [end]]).astype(np.int64)
