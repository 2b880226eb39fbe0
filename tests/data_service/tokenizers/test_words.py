"""Word beginnings, kind by kind, on real segmentations."""

import numpy as np
import pytest


def _words(tokenizer, text: str) -> list[str]:
    """Split a segmentation where `word_starts` says, the first piece counting as a beginning."""
    ids = tokenizer.encode(text)
    starts = tokenizer.word_starts[ids].copy()
    starts[0] = True
    return [tokenizer.decode(group).strip() for group in np.split(ids, np.flatnonzero(starts)[1:])]


def test_byte_level_words_carry_their_punctuation(trained) -> None:
    tokenizer = trained("byte_bpe")
    assert _words(tokenizer, "Unbelievable exceptions, don't worry.\nNew line") == [
        "Unbelievable",
        "exceptions,",
        "don't",
        "worry.",
        "New",
        "line",
    ]


def test_wordpiece_words_are_berts(trained) -> None:
    tokenizer = trained("wordpiece")
    words = [word.replace(" ", "") for word in _words(tokenizer, "unbelievable exceptions, see f(x)")]
    assert words == ["unbelievable", "exceptions", ",", "see", "f", "(", "x", ")"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_words_begin_at_the_space_mark(trained, kind) -> None:
    tokenizer = trained(kind)
    words = _words(tokenizer, "unbelievable exceptions don't 日本")
    assert words[:3] == ["unbelievable", "exceptions", "don't"]


def test_special_tokens_and_only_they_are_words_by_role(tokenizer) -> None:
    assert tokenizer.word_starts[tokenizer.special_mask].all()
    assert not tokenizer.word_starts.all()
    assert tokenizer.word_starts.shape == (tokenizer.vocab_size,)
    assert not tokenizer.word_starts.flags.writeable


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_bytes_never_begin_a_word(trained, kind) -> None:
    tokenizer = trained(kind)
    assert not tokenizer.word_starts[tokenizer.piece_id("<0xE6>")]
