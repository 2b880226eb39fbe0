"""Corpora for measurements: random text in real shards, and the manifest of a corpus that has no data."""

import numpy as np

from data_service.corpus.manifest import CorpusManifest, block_table
from data_service.ingest.options import BuildOptions
from data_service.store.base import Store
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block
from tests.support.data import synthetic as synthetic_rows
from tests.support.data.synthetic import RandomText

VOCABULARY = 50_265
SPECIAL = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)
NEVER_MASKED = (0, 1, 2, 3, 4)
BLOCK_TOKENS = BuildOptions().block_tokens  # what users get
TEXT = RandomText(range(len(NEVER_MASKED), VOCABULARY), BLOCK_TOKENS)

_SENTENCE, _DOCUMENT = 24, 26  # mean tokens in a sentence, sentences in a document: English prose
_BLOCKS_PER_SHARD = 64


def random_block(seed: int) -> Block:
    """A block of uniformly random ordinary tokens, its sentences and documents as long as English ones."""
    return TEXT.block(seed)


def write_corpus(store: Store, blocks: int) -> CorpusManifest:
    """Write `blocks` random blocks as a corpus at the store's root."""
    return synthetic_rows.write_corpus(store, blocks, TEXT, vocabulary=VOCABULARY)


def synthetic_manifest(tokens: int) -> CorpusManifest:
    """The manifest of a corpus of so many tokens in blocks of the default size. There is nothing behind it."""
    blocks = -(-tokens // BLOCK_TOKENS)
    length = 2 * BLOCK_TOKENS + 8 * BLOCK_TOKENS // _SENTENCE + 4096
    sentences, documents = BLOCK_TOKENS // _SENTENCE, BLOCK_TOKENS // _SENTENCE // _DOCUMENT
    rows = [
        (n // _BLOCKS_PER_SHARD, n % _BLOCKS_PER_SHARD * length, length, BLOCK_TOKENS, sentences, documents)
        for n in range(blocks)
    ]
    shards = [f"train/{n:06d}.tar" for n in range(-(-blocks // _BLOCKS_PER_SHARD))]
    return CorpusManifest(
        tokenizer_hash="0" * 64,
        vocab_size=VOCABULARY,
        heldout_fraction=0.0,
        train=block_table(rows, [f"{n:032x}" for n in range(blocks)], shards),
        heldout=block_table([], [], []),
        unigram=np.zeros(VOCABULARY, dtype=np.int64),
        shard_sizes=dict.fromkeys(shards, _BLOCKS_PER_SHARD * length),
        shard_digests=dict.fromkeys(shards, "0" * 32),
        counts={},
        options={},
    )
