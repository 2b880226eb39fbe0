"""Quicker libraries are used as far as they give what the definition gives, and what they do not give is left to it."""

import os
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import pytest
from numpy.typing import NDArray

from data_service.tokenizers import quick
from data_service.tokenizers.load import from_files
from data_service.tokenizers.quick import COMPARED_CHARACTERS, TextEncoder
from data_service.tokenizers.tokenizer import Kind, PlacedTokens, Tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.raw_text import DOCUMENTS

KINDS: tuple[Kind, ...] = ("byte_bpe", "wordpiece", "unigram")
LIBRARIES = {
    "byte_bpe": "fastokens 0.3.5",
    "wordpiece": "splintr-rs 0.22.0",
    "unigram": "splintr-rs 0.22.0",
}
DEFINITION = f"tokenizers {version('tokenizers')}"


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(kind, DOCUMENTS[:60], 2000) for kind in KINDS}


@pytest.fixture
def unknown_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in quick.TESTED_VERSIONS:
        monkeypatch.setitem(quick.TESTED_VERSIONS, library, "0.0")


def _anew(tokenizer: Tokenizer) -> Tokenizer:
    return from_files(tokenizer.save_files())


def _same(tokenizer: Tokenizer, encoder: TextEncoder, texts: list[str]) -> None:
    for found, ids in zip(encoder.encode_placed(texts, True), tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(found.ids, ids)
        assert found.ids.dtype == ids.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_of_tokens_unless_those_of_words_will_do(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, texts = tokenizers[kind], DOCUMENTS[:4]
    for found, expected in zip(
        TextEncoder(tokenizer).encode_placed(texts), tokenizer.encode_placed(texts), strict=True
    ):
        assert found.equals(expected)


def test_a_character_that_a_library_takes_for_another_is_left_to_the_definition(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """splintr 0.22.0 knows punctuation that is newer than the tables of tokenizers 0.23.3."""
    encoder, texts = TextEncoder(tokenizers["wordpiece"]), ["plain. text", "a\u2e43b and c\u09fdd", "é, ü"]
    _same(tokenizers["wordpiece"], encoder, texts)
    assert encoder.counts == {LIBRARIES["wordpiece"]: 2, DEFINITION: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_library_that_differs_is_used_no_more(
    tokenizers: dict[str, Tokenizer], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, library = _anew(tokenizers[kind]), LIBRARIES[kind].split()[0]

    def exchanging(text: str) -> NDArray[np.uint32]:
        ids = tokenizer.encode(text).astype(np.uint32)
        if len(text) > 1000:  # right for the short texts by which characters are tried
            ids[[1, 2]] = ids[[2, 1]]
        return ids

    monkeypatch.setitem(quick.OPENERS, library, lambda _: exchanging)
    encoder, texts = TextEncoder(tokenizer), [text for text in DOCUMENTS if len(text) > 1000][:3]
    _same(tokenizer, encoder, texts)
    assert encoder.counts == {f"{DEFINITION} ({LIBRARIES[kind]} differs)": 3}


def test_every_text_at_the_beginning_is_encoded_both_ways(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = tokenizers["byte_bpe"], list[str]()
    defined = tokenizer.encode_placed

    def counted(texts: Sequence[str], by_word: bool = False) -> list[PlacedTokens]:
        seen.extend(texts)
        return defined(texts, by_word)

    monkeypatch.setattr(tokenizer, "encode_placed", counted)
    encoder, text = TextEncoder(tokenizer), "a few words of text " * 1000
    for _ in range(COMPARED_CHARACTERS // len(text) + 2):
        encoder.encode_placed([text])
    assert len(seen) == -(-COMPARED_CHARACTERS // len(text))


def test_other_versions_are_not_used(tokenizers: dict[str, Tokenizer], unknown_versions: None) -> None:
    encoder = TextEncoder(train_tokenizer("byte_bpe", DOCUMENTS[:50], 600))
    encoder.encode_placed(["a b"])
    assert encoder.counts == {f"{DEFINITION} (fastokens is 0.3.5, only 0.0 was tested)": 1}


def test_for_little_text_no_library_is_opened(tokenizers: dict[str, Tokenizer]) -> None:
    encoder = TextEncoder(tokenizers["byte_bpe"], quick.MIN_QUICK_TEXT_BYTES - 1)
    encoder.encode_placed(["a b"])
    assert encoder.counts == {DEFINITION: 1}


def test_other_kinds_are_left_to_the_definition() -> None:
    encoder = TextEncoder(train_tokenizer("bpe", DOCUMENTS[:50], 600))
    encoder.encode_placed(["a b", "c"])
    assert sum(encoder.counts.values()) == 2
    assert all(library.startswith(DEFINITION) for library in encoder.counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_may_be_forked_afterwards(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    encoder, texts = TextEncoder(tokenizers[kind]), DOCUMENTS[:6]
    expected = encoder.encode_placed(texts, True)
    child = os.fork()
    if child == 0:
        again = encoder.encode_placed(texts, True)
        os._exit(0 if all(a.equals(b) for a, b in zip(again, expected, strict=True)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
