"""Where the pieces of one vocabulary come from in another."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from data_service.errors import TokenizerError
from data_service.tokenizers.extend import extend_tokenizer
from data_service.tokenizers.load import from_files
from data_service.tokenizers.options import TokenizerOptions
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import train_tokenizer
from data_service.tokenizers.transfer import Origins, origins


def _of(found: Origins, new_id: int) -> list[int]:
    return found.ids[found.offsets[new_id] : found.offsets[new_id + 1]].tolist()


def test_a_new_word_comes_from_the_pieces_it_was_split_into(tokenizer: Tokenizer) -> None:
    new = extend_tokenizer(tokenizer, ["neurotransmitter", "myocardial"]).tokenizer
    found = origins(tokenizer, new)
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
    found = origins(tokenizer, other)
    known = {piece: i for i, piece in enumerate(tokenizer.pieces)}
    copied = [i for i, piece in enumerate(other.pieces) if piece in known]
    assert found.copied == len(copied) > 600
    assert all(_of(found, i) == [known[other.pieces[i]]] for i in copied)
    assert (np.diff(found.offsets) > 0).all()
    assert found.ids.max() < tokenizer.vocab_size


def test_word_beginnings_and_continuations_are_told_apart(
    trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    wordpiece = trained("wordpiece")
    other = train_tokenizer("wordpiece", documents, 3000)
    found = origins(wordpiece, other)
    new = [i for i, piece in enumerate(other.pieces) if piece not in set(wordpiece.pieces)]
    continued = [i for i in new if other.pieces[i].startswith("##")]
    assert len(new) > len(continued) > 100
    for i in new:
        first, *rest = (wordpiece.pieces[source] for source in _of(found, i))
        text = first.removeprefix("##") + "".join(piece.removeprefix("##") for piece in rest)
        assert text == other.pieces[i].removeprefix("##")
        assert first.startswith("##") == other.pieces[i].startswith("##")
        assert all(piece.startswith("##") for piece in rest)


def test_special_tokens_follow_their_roles(
    trained: Callable[[Kind], Tokenizer], documents: list[str]
) -> None:
    old = trained("unigram")
    new = train_tokenizer("unigram", documents, 1300, TokenizerOptions(specials="xlnet"))
    found = origins(old, new)
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert _of(found, getattr(new.special, role)) == [getattr(old.special, role)]


def test_part_of_a_character_comes_from_its_bytes(trained: Callable[[Kind], Tokenizer]) -> None:
    old = trained("byte_bpe")
    files = old.save_files()

    definition = json.loads(files["tokenizer.json"])
    piece = "\u00e6\u0139"  # two bytes of three
    definition["model"]["vocab"][piece] = 1500
    new = from_files({"tokenizer.json": json.dumps(definition).encode()})
    assert _of(origins(old, new), 1500) == [old.piece_id(byte) for byte in piece]


def test_unrelated_tokenizers_are_refused(trained: Callable[[Kind], Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="write words in different ways"):
        origins(trained("wordpiece"), trained("byte_bpe"))
    latin, greek = (
        train_tokenizer("wordpiece", [text * 20], 12, TokenizerOptions(min_frequency=1))
        for text in ("ab ab", "αβ αβ")
    )
    with pytest.raises(TokenizerError, match="no piece in common"):
        origins(latin, greek)
