"""Synthetic corpora: whole in themselves, and rows of every kind of input come from them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.corpus import verify_corpus
from data_service.corpus.manifest import PairTexts
from data_service.store.open import open_store
from launcher.plan.measure.rows import RandomText, first_ordinary, random_tokenizer, write_corpus


@settings(deadline=None, max_examples=40)
@given(
    stop=st.sampled_from((300, 65_536, 128_000)),
    tokens=st.integers(200, 5000),
    pairs=st.none() | st.integers(0, 3).map(PairTexts),
    text=st.integers(4, 30),
    seed=st.integers(0, 99),
)
def test_random_blocks_are_whole_documents_of_ordinary_tokens(
    stop: int, tokens: int, pairs: PairTexts | None, text: int, seed: int
) -> None:
    made = RandomText(range(5, stop), tokens, pairs, text if pairs else None).block(seed)
    assert made.tokens.min() >= 5
    assert made.tokens.max() < stop
    assert made.tokens.dtype == (np.uint16 if stop <= 1 << 16 else np.uint32)
    for bounds, end in ((made.sentences, len(made.tokens)), (made.documents, len(made.sentences) - 1)):
        assert (bounds[0], bounds[-1]) == (0, end)
        assert (np.diff(bounds) > 0).all()
    if pairs is not None:
        assert set(np.diff(made.documents)) == {pairs.texts}
        assert set(np.diff(made.sentences)) == {text}


def test_the_random_corpus_has_no_damage(tmp_path: Path) -> None:
    tokenizer = random_tokenizer(300)
    text = RandomText(range(first_ordinary(), 300), 2000)
    manifest = write_corpus(open_store(tmp_path), 3, text, vocabulary=300, tokenizer=tokenizer)
    assert len(manifest.train) == 3
    assert manifest.heldout.tokens.sum() == 2000
    assert not verify_corpus(str(tmp_path)).damage


@pytest.mark.long
@pytest.mark.parametrize("size", [300, 70_000])
def test_a_tokenizer_has_the_size_and_the_words_asked_for(size: int) -> None:
    tokenizer = random_tokenizer(size)
    assert tokenizer.vocab_size == size
    assert tokenizer.special_mask.sum() == first_ordinary()
    assert 0.6 < tokenizer.word_starts[first_ordinary() :].mean() < 0.8
