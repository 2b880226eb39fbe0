"""Words are those of datatrove's tokenizers, whatever stands where, and whatever was split before."""

import random
from functools import cache
from typing import Any

import pytest

from data_service.prepare import words
from data_service.prepare.words import WordSplitter
from tests.support.data.hostile_texts import hostile_text

pytest.importorskip("datatrove", reason="needs maskfleet[prepare]")
pytest.importorskip("spacy", reason="needs maskfleet[prepare]")

LANGUAGES = ("eng", "deu", "spa", "rus")  # special cases of Spanish and Russian hold spaces
OTHERS = (
    "fra",
    "ita",
    "por",
    "nld",
    "pol",
    "ces",
    "fin",
    "hun",
    "tur",
    "ell",
    "ukr",
    "arb",
    "fas",
    "heb",
    "hin",
    "cym",
)


@cache
def theirs(language: str) -> Any:
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    return load_word_tokenizer(language)


@cache
def parts_of(language: str) -> list[str]:
    """Special cases of the language, and what their parts are without them."""
    from spacy.tokenizer import Tokenizer

    tokenizer = theirs(language).tokenizer.tokenizer
    names = ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
    plain = Tokenizer(tokenizer.vocab, rules={}, **{name: getattr(tokenizer, name) for name in names})
    rules = sorted(tokenizer.rules)
    rules = random.Random(1).sample(rules, min(len(rules), 400))
    return sorted({word.text for rule in rules for word in plain(rule)} | set(rules))


def check(language: str, texts: int, seed: int) -> None:
    ours, drawn = WordSplitter(language), random.Random(seed)
    for _ in range(texts):
        text = hostile_text(drawn, parts_of(language))
        assert ours.split(text).texts() == theirs(language).word_tokenize(text), repr(text)


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_are_those_of_the_tokenizer(language: str) -> None:
    check(language, 80, 1)


@pytest.mark.long
@pytest.mark.parametrize("language", [*LANGUAGES, *OTHERS])
def test_words_of_many_texts(language: str) -> None:
    try:
        tokenizer = theirs(language)
    except ImportError as missing:  # Stanza, for some
        pytest.skip(str(missing))
    if not hasattr(tokenizer, "tokenizer"):
        pytest.skip("not split by spaCy")
    check(language, 2_000, 2)


def test_a_special_case_over_a_space_undoes_one_within_a_chunk() -> None:
    ours = WordSplitter("eng")
    assert ours.split("=\n):=").texts() == ["=", "):", "="]
    assert ours.split("= ):=").texts() == ["=", ")", ":", "="] == theirs("eng").word_tokenize("= ):=")


def test_what_was_split_before_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if chunks are forgotten again and again. spaCy's tokenizer alone fails at the second IS_ALPHA."""
    drawn = random.Random(3)
    texts = [hostile_text(drawn, ["IS_ALPHA", "x", ":", "("]) for _ in range(100)]
    before = WordSplitter("eng")
    found = [before.split(text).texts() for text in texts]
    monkeypatch.setattr(words, "_CACHE_CHARACTERS", 3_000)
    after = WordSplitter("eng")
    assert [after.split(text).texts() for text in reversed(texts)] == found[::-1]
    assert sum("IS_ALPHA" in each for each in found) > 2


def test_whole_texts_of_a_tokenizer_that_is_not_spacys(monkeypatch: pytest.MonkeyPatch) -> None:
    from datatrove.utils import text as datatrove_text

    monkeypatch.setattr(words._SpaCy, "load", lambda language: None)
    splitter = WordSplitter("eng")
    drawn = random.Random(4)
    for _ in range(20):
        text = hostile_text(drawn)
        assert splitter.split(text).texts() == datatrove_text.split_into_words(text, "eng")
        assert splitter.split(text).min_sentence_count() == 1


def test_a_tokenizer_that_differs_on_the_trial_gets_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words._SpaCy, "chunks", lambda self, text: text.split())  # no special case over a space
    assert WordSplitter("eng").split("= ):=").texts() == theirs("eng").word_tokenize("= ):=")
