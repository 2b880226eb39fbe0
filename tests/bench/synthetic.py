"""Corpora for measurements: random text in real shards, with sentences and documents as long as English prose's."""

from data_service.corpus.manifest import CorpusManifest
from data_service.ingest.options import BuildOptions
from data_service.store.base import Store
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED as NEVER_MASKED
from tests.support.data.corpora import SPECIAL as SPECIAL
from tests.support.data.corpora import random_block, write_into

VOCABULARY = 50_265
BLOCK_TOKENS = BuildOptions().block_tokens  # what users get


def block(seed: int) -> Block:
    """Return the block that is drawn from `seed`."""
    return random_block(seed, BLOCK_TOKENS, sentence=24, document=26, vocabulary=VOCABULARY)


def write_corpus(store: Store, blocks: int) -> CorpusManifest:
    """Write `blocks` random blocks and a held-out one as a corpus at the store's root."""
    return write_into(store, map(block, range(blocks)), [block(blocks)], vocabulary=VOCABULARY, shard_blocks=16)
