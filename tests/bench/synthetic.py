"""Corpora for measurements: random text in real shards."""

from data_service.corpus.manifest import CorpusManifest
from data_service.ingest.options import BuildOptions
from data_service.store.base import Store
from data_service.tokenizers.specials import SpecialIds
from tests.support.data import synthetic_rows
from tests.support.data.synthetic_rows import RandomText

VOCABULARY = 50_265
SPECIAL = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)
NEVER_MASKED = (0, 1, 2, 3, 4)
BLOCK_TOKENS = BuildOptions().block_tokens  # what users get
TEXT = RandomText(range(len(NEVER_MASKED), VOCABULARY), BLOCK_TOKENS)


def write_corpus(store: Store, blocks: int) -> CorpusManifest:
    """Write `blocks` random blocks as a corpus at the store's root."""
    return synthetic_rows.write_corpus(store, blocks, TEXT, vocabulary=VOCABULARY)
