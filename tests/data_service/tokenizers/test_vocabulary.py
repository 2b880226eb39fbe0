"""New words become one token and everything else keeps its ids; where the pieces of one vocabulary come from in
another.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer

from data_service.errors import TokenizerError
from data_service.tokenizers.load import from_files, load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from data_service.tokenizers.vocabulary import PieceOrigins, extend_tokenizer, find_piece_origins

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


def test_existing_ids_stay_and_text_without_terms_is_split_as_before(tokenizer: Tokenizer, lines: list[str]) -> None:
    new = extend_tokenizer(tokenizer, TERMS).tokenizer
    assert new.pieces[: tokenizer.vocab_size] == tokenizer.pieces
    assert new.special == tokenizer.special
    assert new.names == tokenizer.names
    before, after = _ids(tokenizer, lines), _ids(new, lines)
    same = sum(a == b for a, b in zip(before, after, strict=True))
    with_terms = sum(any(term in line for term in TERMS[:-1]) for line in lines)
    assert same >= len(lines) - with_terms
    assert with_terms < 20


@pytest.mark.long
@pytest.mark.parametrize("model_type", [None, "roberta", "bert", "albert", "xlnet", "deberta-v2", "electra"])
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
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert getattr(theirs, f"{role}_token_id") == getattr(new.special, role)
    back = load_tokenizer(str(tmp_path))
    assert back.hash == new.hash
    assert _ids(back, texts) == _ids(new, texts)


def tokenizer_row(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.special.cls, *tokenizer.encode(text).tolist(), tokenizer.special.sep]


@pytest.mark.long
def test_extending_twice_is_extending_once(tokenizer: Tokenizer, lines: list[str]) -> None:
    once = extend_tokenizer(tokenizer, ["neuro", "Zürich"]).tokenizer
    twice = extend_tokenizer(extend_tokenizer(tokenizer, ["neuro"]).tokenizer, ["Zürich"]).tokenizer
    assert sorted(once.pieces) == sorted(twice.pieces)
    texts = LINES + lines
    decoded = [[once.piece(i) for i in ids] for ids in _ids(once, texts)]
    assert decoded == [[twice.piece(i) for i in ids] for ids in _ids(twice, texts)]


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
    assert 1500 in new.encode("<late>")


def test_an_uncased_vocabulary_folds_its_terms(documents: list[str]) -> None:
    uncased = train_tokenizer("wordpiece", documents, 1200, TokenizerOptions(lowercase=True, strip_marks=True))
    extension = extend_tokenizer(uncased, ["Zürich", "zurich"])
    assert extension.added == ("zurich",)
    assert extension.tokenizer.encode("ZÜRICH").tolist() == [1200]


@pytest.mark.parametrize("terms", [["two words"], ["", "  "]])
def test_what_cannot_be_one_word_is_refused(tokenizer: Tokenizer, terms: list[str]) -> None:
    with pytest.raises(TokenizerError, match=r"'two words'|\bterms\b"):
        extend_tokenizer(tokenizer, terms)


def _of(found: PieceOrigins, new_id: int) -> list[int]:
    return found.ids[found.offsets[new_id] : found.offsets[new_id + 1]].tolist()


def test_a_new_word_comes_from_the_pieces_it_was_split_into(tokenizer: Tokenizer) -> None:
    new = extend_tokenizer(tokenizer, ["neurotransmitter", "myocardial"]).tokenizer
    found = find_piece_origins(tokenizer, new)
    assert len(found.offsets) == new.vocab_size + 1
    assert all(_of(found, i) == [i] for i in range(tokenizer.vocab_size))
    assert (found.copied, found.averaged) == (tokenizer.vocab_size, new.vocab_size - tokenizer.vocab_size)
    for new_id in range(tokenizer.vocab_size, new.vocab_size):
        text = new.decode([new_id])
        assert _of(found, new_id) == tokenizer.encode(text).tolist()
        assert len(_of(found, new_id)) > 1


def test_pieces_are_matched_by_name_whatever_their_ids(
    tokenizer: Tokenizer, trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    other = train_tokenizer(tokenizer.kind, documents[20:], 1300)
    found = find_piece_origins(tokenizer, other)
    known = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    copied = [i for i, piece in enumerate(other.pieces) if piece in known]
    assert found.copied == len(copied) > 600
    assert all(_of(found, i) == [known[other.pieces[i]]] for i in copied)
    assert (np.diff(found.offsets) > 0).all()
    assert found.ids.max() < tokenizer.vocab_size


@pytest.mark.long
def test_word_beginnings_and_continuations_are_told_apart(
    trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    wordpiece = trained("wordpiece")
    other = train_tokenizer("wordpiece", documents, 3000)
    found = find_piece_origins(wordpiece, other)
    new = [i for i, piece in enumerate(other.pieces) if piece not in set(wordpiece.pieces)]
    continued = [i for i in new if other.pieces[i].startswith("##")]
    assert len(new) > len(continued) > 100
    for i in new:
        first, *rest = (wordpiece.pieces[source] for source in _of(found, i))
        text = first.removeprefix("##") + "".join(piece.removeprefix("##") for piece in rest)
        assert text == other.pieces[i].removeprefix("##")
        assert first.startswith("##") == other.pieces[i].startswith("##")
        assert all(piece.startswith("##") for piece in rest)


@pytest.mark.long
def test_special_tokens_follow_their_roles(trained: Callable[[Kind], Tokenizer], documents: list[str]) -> None:
    old = trained("unigram")
    new = train_tokenizer("unigram", documents, 1300, TokenizerOptions(specials="xlnet"))
    found = find_piece_origins(old, new)
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert _of(found, getattr(new.special, role)) == [getattr(old.special, role)]


def test_part_of_a_character_comes_from_its_bytes(trained: Callable[[Kind], Tokenizer]) -> None:
    old = trained("byte_bpe")
    files = old.save_files()

    definition = json.loads(files["tokenizer.json"])
    piece = "\u00e6\u0139"  # two bytes of three
    definition["model"]["vocab"][piece] = 1500
    new = from_files({"tokenizer.json": json.dumps(definition).encode()})
    assert _of(find_piece_origins(old, new), 1500) == [old.pieces.index(byte) for byte in piece]


def test_unrelated_tokenizers_are_refused(trained: Callable[[Kind], Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match=r"\bwordpiece\b.*\bbyte_bpe\b"):
        find_piece_origins(trained("wordpiece"), trained("byte_bpe"))
    latin, greek = (
        train_tokenizer("wordpiece", [text * 20], 12, TokenizerOptions(min_frequency=1)) for text in ("ab ab", "αβ αβ")
    )
    with pytest.raises(TokenizerError, match="common"):
        find_piece_origins(latin, greek)
