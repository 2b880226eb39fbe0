"""New words become one token, everything else keeps its ids, and transformers agrees."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.check import check_tokenizer
from data_service.tokenizers.extend import extend_tokenizer
from data_service.tokenizers.load import from_files, load_tokenizer, save_tokenizer
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import train_tokenizer

TERMS = ["neurotransmitter", "Zürich", "neuro", "日", "the"]
LINES = [
    "neurotransmitter",
    "a neurotransmitter and neurotransmitters, neuroscience (neuro) near Zürich.",
    "Zürich is not zürich; the NEUROTRANSMITTER",
    "  neurotransmitter \t neuro\nneurotransmitter",
    "日本 日",
]


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


def test_each_term_is_one_token(tokenizer: Tokenizer) -> None:
    extension = extend_tokenizer(tokenizer, TERMS)
    new = extension.tokenizer
    for term in TERMS:
        (piece,) = new.encode(term)
        assert new.decode([piece]).strip() == term
        assert new.word_starts[piece] or tokenizer.kind == "byte_bpe"
        assert new.decode(new.encode(f"is {term} here")) == f"is {term} here"
        assert np.count_nonzero(new.encode(f"is {term} here") >= tokenizer.vocab_size) == (term != "the")
    assert extension.known == ("the",)
    assert new.pieces[tokenizer.vocab_size :] == extension.added
    assert not new.special_mask[tokenizer.vocab_size :].any()


def test_byte_level_terms_begin_words_after_a_space(trained: Callable[[Kind], Tokenizer]) -> None:
    new = extend_tokenizer(trained("byte_bpe"), ["neurotransmitter"]).tokenizer
    assert new.pieces[-2:] == ("neurotransmitter", "Ġneurotransmitter")
    assert new.word_starts[-2:].tolist() == [False, True]


def test_existing_ids_stay_and_text_without_terms_is_split_as_before(
    tokenizer: Tokenizer, lines: list[str]
) -> None:
    new = extend_tokenizer(tokenizer, TERMS).tokenizer
    assert new.pieces[: tokenizer.vocab_size] == tokenizer.pieces
    assert new.special == tokenizer.special
    assert new.names == tokenizer.names
    before, after = _ids(tokenizer, lines), _ids(new, lines)
    same = sum(a == b for a, b in zip(before, after, strict=True))
    with_terms = sum(any(term in line for term in TERMS[:-1]) for line in lines)
    assert same >= len(lines) - with_terms
    assert with_terms < 20


@pytest.mark.drawn(4)
@pytest.mark.parametrize("model_type", [None, "roberta", "deberta-v2"])
def test_auto_tokenizer_gives_the_same_ids(
    tokenizer: Tokenizer, model_type: str | None, lines: list[str], tmp_path: Path
) -> None:
    new = extend_tokenizer(tokenizer, TERMS).tokenizer
    save_tokenizer(new, str(tmp_path))
    if model_type is not None:  # as in an exported model's folder
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == new.vocab_size
    texts = LINES + lines
    assert theirs(texts, add_special_tokens=False)["input_ids"] == _ids(new, texts)
    assert theirs("neuro")["input_ids"] == tokenizer_row(new, "neuro")
    back = load_tokenizer(str(tmp_path))
    assert back.hash == new.hash
    assert _ids(back, texts) == _ids(new, texts)


def tokenizer_row(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.special.cls, *tokenizer.encode(text).tolist(), tokenizer.special.sep]


def test_extending_twice_is_extending_once(tokenizer: Tokenizer, lines: list[str]) -> None:
    once = extend_tokenizer(tokenizer, ["neuro", "Zürich"]).tokenizer
    twice = extend_tokenizer(extend_tokenizer(tokenizer, ["neuro"]).tokenizer, ["Zürich"]).tokenizer
    assert sorted(once.pieces) == sorted(twice.pieces)
    texts = LINES + lines
    decoded = [[once.piece(i) for i in ids] for ids in _ids(once, texts)]
    assert decoded == [[twice.piece(i) for i in ids] for ids in _ids(twice, texts)]


def test_the_check_passes(tokenizer: Tokenizer, documents: list[str]) -> None:
    before, after = (
        check_tokenizer(t, documents) for t in (tokenizer, extend_tokenizer(tokenizer, TERMS).tokenizer)
    )
    assert (after.exact, after.stable) == (before.exact, before.stable)
    assert after.tokens <= before.tokens


def test_the_sentencepiece_model_is_extended_too(trained: Callable[[Kind], Tokenizer]) -> None:
    new = extend_tokenizer(trained("unigram"), TERMS).tokenizer
    model = new.save_files()["spiece.model"]
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [original.encode(line) for line in LINES[:2]] == _ids(new, LINES[:2])
    assert from_files({"spiece.model": model}).pieces == new.pieces


def test_added_tokens_after_the_model_keep_their_ids(
    trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    """As in DeBERTa's folders, whose [MASK] is no piece of the SentencePiece model."""
    files = trained("unigram").save_files()
    definition = json.loads(files["tokenizer.json"])
    template = next(token for token in definition["added_tokens"] if token["content"] == "[MASK]")
    definition["added_tokens"] += [template | {"id": 1500, "content": "<late>"}]
    old = from_files({"tokenizer.json": json.dumps(definition).encode()})
    assert old.pieces[1500:] == ("<late>",)
    new = extend_tokenizer(old, ["neuro"]).tokenizer
    assert new.pieces[1500:] == ("<late>", "▁neuro")
    assert new.special_mask[1500:].tolist() == [True, False]
    assert _ids(new, documents[:3]) == _ids(old, documents[:3])
    assert "<late>" in new.decode(new.encode("<late>"))
    assert 1500 not in new.encode("<late>")


def test_an_uncased_vocabulary_folds_its_terms(documents: list[str]) -> None:
    uncased = train_tokenizer("wordpiece", documents, 1200, TokenizerOptions(lowercase=True))
    extension = extend_tokenizer(uncased, ["Zürich", "zurich"])
    assert extension.added == ("zurich",)
    assert extension.tokenizer.encode("ZÜRICH").tolist() == [1200]


@pytest.mark.parametrize("terms", [["two words"], ["", "  "]])
def test_what_cannot_be_one_word_is_refused(tokenizer: Tokenizer, terms: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"'two words' is not one word|no terms"):
        extend_tokenizer(tokenizer, terms)
