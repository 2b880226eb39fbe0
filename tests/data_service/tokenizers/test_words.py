# ruff: noqa: RUF001
"""Word beginnings, kind by kind, on real segmentations."""

import json
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from data_service.tokenizers.load import from_files
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.words import word_start_table

# Blocks in which scripts without spaces lie; text of others keeps its words.
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Tibetan}\p{Myanmar}\p{Khmer}\p{Tai_Le}\p{New_Tai_Lue}"
    r"\p{Tai_Tham}\p{Tai_Viet}\u3000-\u30FF\u3400-\u9FFF\uF900-\uFAFF\uFF66-\uFF9D\U00020000-\U0003FFFF]"
)


@cache
def byte_level() -> ByteLevel:
    return ByteLevel(add_prefix_space=False, use_regex=False)


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    """Split a segmentation where `word_start_table` says, the first piece counting as a beginning."""
    ids = tokenizer.encode(text)
    starts = tokenizer.word_starts[ids].copy()
    starts[0] = True
    return [tokenizer.decode(group.tolist()).strip() for group in np.split(ids, np.flatnonzero(starts)[1:])]


def test_byte_level_words_carry_their_punctuation(trained: Callable[[Kind], Tokenizer]) -> None:
    tokenizer = trained("byte_bpe")
    assert _words(tokenizer, "Unbelievable exceptions, don't worry.\nNew line") == [
        "Unbelievable",
        "exceptions,",
        "don't",
        "worry.",
        "New",
        "line",
    ]


def test_wordpiece_words_are_berts(trained: Callable[[Kind], Tokenizer]) -> None:
    tokenizer = trained("wordpiece")
    words = [word.replace(" ", "") for word in _words(tokenizer, "unbelievable exceptions, see f(x)")]
    assert words == ["unbelievable", "exceptions", ",", "see", "f", "(", "x", ")"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_words_begin_at_the_space_mark(trained: Callable[[Kind], Tokenizer], kind: Kind) -> None:
    tokenizer = trained(kind)
    words = _words(tokenizer, "unbelievable exceptions don't 日本")
    assert words[:3] == ["unbelievable", "exceptions", "don't"]


def test_special_tokens_and_only_they_are_words_by_role(tokenizer: Tokenizer) -> None:
    assert tokenizer.word_starts[tokenizer.special_mask].all()
    assert not tokenizer.word_starts.all()
    assert tokenizer.word_starts.shape == (tokenizer.vocab_size,)
    assert not tokenizer.word_starts.flags.writeable


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_only_bytes_that_must_be_han_begin_a_word(trained: Callable[[Kind], Tokenizer], kind: Kind) -> None:
    tokenizer = trained(kind)
    begins = {i for i in range(256) if tokenizer.word_starts[tokenizer.pieces.index(f"<0x{i:02X}>")]}
    assert begins == set(range(0xE4, 0xEA))


def _characters_whole(text: str) -> Tokenizer:
    """A byte-level BPE that has a piece for each character of `text`."""
    written = ["".join(part for part, _ in byte_level().pre_tokenize_str(character)) for character in text]
    merges = dict.fromkeys((piece[:i], piece[i]) for piece in written for i in range(1, len(piece)))
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = dict.fromkeys([*names, *sorted(ByteLevel.alphabet()), *map("".join, merges)])
    vocabulary = json.dumps({piece: i for i, piece in enumerate(pieces)})
    lines = "\n".join(" ".join(pair) for pair in merges)
    return from_files({"vocab.json": vocabulary.encode(), "merges.txt": lines.encode()})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("今日は良い。ABCです", "今 日 は 良 い。ABC で す"),
        ("我们2024年去", "我 们2024 年 去"),
        ("วันนี้อากาศดี", "วั น นี้ อา กา ศ ดี"),
        ("ສະບາຍດີ", "ສະ ບາ ຍ ດີ"),
        ("한국어는 띄어쓰기", "한국어는 띄어쓰기"),
        ("это слова, да", "это слова, да"),
    ],
)
def test_a_sentence_without_spaces_is_many_words(text: str, words: str) -> None:
    assert _words(_characters_whole(text), text) == words.split(" ")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_han_spelled_in_bytes_is_a_word_a_character(trained: Callable[[Kind], Tokenizer], kind: Kind) -> None:
    assert _words(trained(kind), "我们今天去公园") == ["", *"我们今天去公园"]


@pytest.mark.parametrize(
    ("piece", "begins"),
    [
        ("日", True), ("日本", True), ("か", True), ("カ", True), ("ｶ", True), ("ー", False), ("。", False),
        ("々", True),
        ("ก", True), ("เ", True), ("ั", False), ("๑", False), ("ລ", True), ("က", True), ("ក", True), ("བ", True),
        ("𠀀", True), ("😀", False), ("한", False), ("ㅋ", False), ("é", False), ("क", False), ("۔", False),
        ("ẞ", False), ("a", False), (" 日", True), ("\n", True),
    ],
)  # fmt: skip
def test_letters_of_scripts_without_spaces_begin_words(piece: str, begins: bool) -> None:
    written = byte_level().pre_tokenize_str(piece)
    pieces = ["".join(part for part, _ in written)]
    assert word_start_table("byte_bpe", pieces, np.zeros(1, dtype=np.bool_)).tolist() == [begins]
    continued = word_start_table("wordpiece", [f"##{piece}"], np.zeros(1, dtype=np.bool_))
    assert continued.tolist() == [begins and not piece[0].isspace()]


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_part_of_a_character_begins_a_word_only_if_its_script_is_certain(text: str) -> None:
    pieces = [part for part, _ in byte_level().pre_tokenize_str(text)]
    prefixes = [piece[: i + 1] for piece in pieces for i in range(len(piece))]
    none = np.zeros(len(prefixes), dtype=np.bool_)
    new, old = word_start_table("byte_bpe", prefixes, none), word_start_table("byte_bpe", prefixes, none, 1)
    assert (new >= old).all()
    if not _UNSPACED.search(text):
        np.testing.assert_array_equal(new, old)
