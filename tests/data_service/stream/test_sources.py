"""What masking knows of the corpora: where words begin, and how often each token occurs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_service.corpus.manifest import MANIFEST_KEY
from data_service.corpus.manifest_file import load_manifest, save_manifest
from data_service.errors import CorpusError
from data_service.store.open import open_store
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from data_service.types import Block
from tests.support.data.corpora import (
    SPECIAL,
    VOCABULARY,
    random_block,
    source_of,
    spec_of,
    write_corpus,
    write_vocabulary,
)

ALWAYS_RANDOM = {"mask": 0, "random": 1, "keep": 0, "random_from": "unigram"}


def test_random_tokens_are_as_frequent_as_in_all_sources_together(tmp_path: Path) -> None:
    blocks = [random_block(seed, 500 + 300 * seed) for seed in range(2)]
    sources = [source_of(write_corpus(tmp_path / str(n), [block]), str(n)) for n, block in enumerate(blocks)]
    unigram = Corpora(spec_of(*sources, masking={"kind": "mlm", "replace": ALWAYS_RANDOM})).token_counts
    counts = [np.bincount(block.tokens, minlength=VOCABULARY) for block in blocks]
    np.testing.assert_array_equal(unigram, sum(counts))


def test_frequencies_of_nothing_are_refused(tmp_path: Path) -> None:
    unknown = Block(np.full(100, SPECIAL.unk, dtype=np.uint16), np.array([0, 100]), np.array([0, 1]))
    uri = write_corpus(tmp_path / "c", [unknown])
    with pytest.raises(CorpusError, match="random_from"):
        Stream(spec_of(source_of(uri), masking={"kind": "mlm", "replace": ALWAYS_RANDOM})).read(0, 0, 1)


@pytest.mark.parametrize("unit", ["whole_word", "ngram", "span"])
def test_words_are_refused_where_no_piece_begins_one(tmp_path: Path, unit: str) -> None:
    uri = write_corpus(tmp_path / "c", [random_block(1, 500)])
    write_vocabulary(uri, [f"##p{number}" for number in range(VOCABULARY - 5)])
    with pytest.raises(CorpusError, match=rf"\b{unit}\b.*\bwords\b"):
        Stream(spec_of(source_of(uri), masking={"kind": "mlm", "unit": unit})).read(0, 0, 1)


def test_only_what_a_scheme_needs_is_read(tmp_path: Path) -> None:
    """A corpus without a tokenizer serves masking by token."""
    uri = write_corpus(tmp_path / "c", [random_block(1, 500)])
    corpora = Corpora(spec_of(source_of(uri)))
    assert corpora.word_start_table is None
    assert corpora.token_counts is None


def test_words_of_an_older_corpus_stay_as_they_were(tmp_path: Path) -> None:
    """Scripts without spaces have words in corpora built by the newer rules; together with an older one, in neither."""
    block = random_block(1, 500)
    for name in ("old", "new"):
        write_vocabulary(write_corpus(tmp_path / name, [block]), [f"p{i}" for i in range(VOCABULARY - 6)] + ["##日"])
    store = open_store(str(tmp_path / "new"))
    built = replace(load_manifest(store), options={"rules": 2})
    store.delete(MANIFEST_KEY)
    save_manifest(store, built)
    old, new = (source_of(str(tmp_path / name), name) for name in ("old", "new"))
    assert old.manifest_fingerprint != new.manifest_fingerprint
    flags = []
    for sources in ((old,), (new,), (old, new)):
        starts = Corpora(spec_of(*sources, masking={"kind": "mlm", "unit": "whole_word"})).word_start_table
        assert starts is not None
        flags.append(bool(starts[-1]))
    assert flags == [False, True, False]
