# ruff: noqa: RUF001
"""Where words and a lexicon's units begin: lists of words, words of the input, and the tokens that begin them."""

import hashlib
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.corpus.words import (
    Segmentation,
    UnitFinder,
    WordList,
    WordOptions,
    mark_word_starts,
    resolve_segmentation,
)
from data_service.errors import InputError
from data_service.ingest.blocks import encode_documents
from data_service.ingest.sentences import split_sentences
from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.chinese import chinese_tokenizer, made_up_documents, made_up_words

letters = st.sampled_from("天地人 ab1，\u0301")
texts = st.text(letters, max_size=25)
lists = st.lists(st.text(st.sampled_from("天地人ab1"), min_size=1, max_size=4), min_size=1, max_size=8)


def spaced(character: str) -> bool:
    """Of the letters above, those of scripts with spaces, and digits."""
    return character in "ab1"


def may_begin(text: str, at: int) -> bool:
    """Whether a word may begin at a place: not inside a run of letters, nor between a character and its mark."""
    if at in (0, len(text)):
        return True
    if text[at] == "\u0301":
        return text[at - 1].isspace()
    return not (spaced(text[at - 1]) and spaced(text[at]))


def longest_words(words: list[str], text: str) -> list[tuple[int, int]]:
    """Said plainly: from left to right, at each place the longest word of the list."""
    found, at = [], 0
    while at < len(text):
        ends = [
            at + len(word)
            for word in words
            if text.startswith(word, at) and may_begin(text, at) and may_begin(text, at + len(word))
        ]
        if ends:
            found.append((at, max(ends)))
        at = max(ends, default=at + 1)
    return found


@given(lists, texts)
def test_the_longest_words_are_found(words: list[str], text: str) -> None:
    assert WordList(words).find_entries(text) == longest_words(words, text)


def of_lexicon(words: list[str], lexicon: dict[str, str]) -> UnitFinder:
    files = {
        "dictionary": "\n".join(words).encode(),
        "lexicon": "".join(f"{text}\t{kind}\n" for text, kind in lexicon.items()).encode(),
    }
    return UnitFinder(Segmentation(segmenter="longest_match", version="1", lexicon="x"), files)


@pytest.mark.long
@given(
    lists,
    st.dictionaries(lists.map(lambda words: words[0]), st.sampled_from(["phrase", "entity"]), min_size=1),
    texts,
)
def test_units_of_each_level(words: list[str], lexicon: dict[str, str], text: str) -> None:
    starts = of_lexicon(words, lexicon).find_unit_starts([text], b"")
    in_words = [(a, b) for a, b in longest_words(words, text)]
    inside = {at for a, b in in_words for at in range(a + 1, b)}
    assert starts[0].tolist() == [at not in inside and may_begin(text, at) for at in range(len(text))]
    for level, entries in (
        (1, list(lexicon)),
        (2, [entry for entry in lexicon if lexicon[entry] == "entity"]),
    ):
        inside = {at for a, b in longest_words(entries, text) for at in range(a + 1, b)}
        assert starts[level].tolist() == [at not in inside for at in range(len(text))]


@given(st.lists(st.text(st.sampled_from("天地 \n\u3000a"), max_size=5), max_size=8), st.data())
def test_words_of_the_input_are_placed_on_its_text(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    flags = mark_word_starts(text, words)
    begins, at = set(), 0
    for word in words:
        size = len("".join(word.split()))
        if size:
            begins.add(at)
        at += size
    assert [bool(flag) for flag in flags] == [place in begins for place in range(at)]
    other = data.draw(st.lists(st.text(st.sampled_from("天地"), max_size=5), max_size=8))
    if "".join("".join(other).split()) != "".join(text.split()):
        with pytest.raises(ValueError, match=r"^after|^word \d+ is"):
            mark_word_starts(text, other)


def token_begins(tokenizer: Tokenizer, sentence: str, starts: list[bool]) -> list[bool]:
    """Said plainly: a token begins a word if the first character of its text, spaces aside, is a word's first."""
    found: list[bool] = []
    before = -1
    for place in tokenizer.encode_placed([sentence])[0].starts.tolist():
        while place < len(sentence) and sentence[place].isspace():
            place += 1
        first = not found or place > before
        found.append(first and place < len(sentence) and starts[place])
        before = place
    return found


@pytest.mark.long
@given(
    st.lists(
        st.text(st.sampled_from("".join(made_up_words()[:9]) + " a。bc\n"), max_size=60).filter(str.strip),
        min_size=1,
        max_size=4,
    )
)
def test_tokens_begin_the_words_of_their_text(documents: list[str]) -> None:
    tokenizer = chinese_tokenizer()
    finder = of_lexicon(list(made_up_words()), dict.fromkeys(made_up_words()[:40], "entity"))
    for text, encoded in zip(documents, encode_documents(tokenizer, documents, finder), strict=True):
        expected: list[list[bool]] = [[], [], []]
        for sentence in split_sentences(text):
            starts = finder.find_unit_starts([sentence], b"")
            for level, flags in enumerate(starts.tolist()):
                expected[level] += token_begins(tokenizer, sentence, flags)
        assert encoded.begins is not None
        assert encoded.begins.tolist() == expected
        (plain,) = encode_documents(tokenizer, [text])
        np.testing.assert_array_equal(plain.tokens, encoded.tokens)


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram", "bpe"])
def test_a_piece_of_several_characters_and_parts_of_one(kind: Kind) -> None:
    """Tokenizers of other kinds: whatever a token holds, words joined from their tokens are those of the text."""
    tokenizer = train_tokenizer(kind, ["天 地 人 、 hello worlds 。"] * 9, 700, allow_fewer_ids=True)
    finder = UnitFinder(Segmentation(segmenter="longest_match", version="1"), {"dictionary": "天地\n人".encode()})
    text = "天地人、天 地 hello worlds。天地"
    (encoded,) = encode_documents(tokenizer, [text], finder)
    assert encoded.begins is not None
    starts = [*np.flatnonzero(encoded.begins[0]).tolist(), len(encoded.tokens)]
    words = [tokenizer.decode(encoded.tokens[a:b]).strip() for a, b in pairwise(starts)]
    assert words == ["天地", "人", "、", "天", "地", "hello", "worlds", "。", "天地"]


@pytest.mark.long
def test_jieba_cuts_all_of_a_text_and_knows_its_users_words(tmp_path: Path) -> None:
    documents = ["".join(words) for words in made_up_documents(20, seed=3)]
    (tmp_path / "user.txt").write_text("北京大学学习\n", "utf-8")
    segmentation, files = resolve_segmentation(WordOptions(user_words=str(tmp_path / "user.txt")))
    assert (segmentation.segmenter, segmentation.version) == ("jieba", version("jieba"))
    assert segmentation.user_words == hashlib.sha256("北京大学学习\n".encode()).hexdigest()
    finder = UnitFinder(segmentation, files)
    sentences = [*documents, "他来到了网易杭研大厦 hello  world 3.14%", " 　\t", "我们在北京大学学习"]
    (found,) = finder.find_unit_starts(sentences, b"")
    assert len(found) == sum(map(len, sentences))
    assert found[np.cumsum([0, *map(len, sentences[:-1])])].all()  # no word goes on in the next sentence
    assert np.flatnonzero(found[-9:]).tolist() == [0, 2, 3]
    (plain,) = UnitFinder(*resolve_segmentation(WordOptions())).find_unit_starts(sentences[-1:], b"")
    assert np.flatnonzero(plain).tolist() == [0, 2, 3, 7]


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"lexicon": "FILE"}, "北京\tcity", "line 1 of the lexicon is not a valid entry"),
        ({"lexicon": "FILE"}, "\n", "holds no entry"),
        ({"segmenter": "longest_match", "dictionary": "FILE"}, " \n", "holds no word"),
        ({"segmenter": "longest_match", "dictionary": "FILE"}, b"\xff\xfe", "not UTF-8"),
        ({"segmenter": "jieba", "dictionary": "FILE"}, "北京", "jieba cannot read"),
        ({"segmenter": "longest_match", "dictionary": "absent"}, "", "no such word file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, options: dict[str, str], content: str | bytes, message: str) -> None:
    file = tmp_path / "words.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = {"segmenter": None} | {
        name: str(file) if value == "FILE" else str(tmp_path / value) if value == "absent" else value
        for name, value in options.items()
    }
    with pytest.raises(InputError, match=message):
        resolve_segmentation(WordOptions.model_validate(settings))
