# ruff: noqa: RUF001
"""Sentence boundaries, and that no text is lost at them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_text import DOCUMENTS, small_tokenizer

from data_service.ingest.blocks import encode_documents
from data_service.ingest.sentences import LONGEST, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
        ("A line\nand another\n\n\nand a paragraph", ["A line", " and another", " and a paragraph"]),
        (
            "Dr. Smith met J. Doe, e.g. at 3.14 p.m. today.",
            ["Dr. Smith met J. Doe, e.g. at 3.14 p.m. today."],
        ),
        ('"Stop!" she said. "Go." He went.', ['"Stop!" she said.', ' "Go."', " He went."]),
        ("Wait... Now. (See below.) Then", ["Wait...", " Now.", " (See below.)", " Then"]),
        (
            "It ended etc. and so on. The U.S. Army came.",
            ["It ended etc. and so on.", " The U.S. Army came."],
        ),
        ("今日は。明日も！ そう", ["今日は。", "明日も！", " そう"]),
        ("  spaced \t out.   Next ", ["spaced \t out.", " Next"]),
        ("Windows\r\nlines\r\n", ["Windows", " lines"]),
        ("...", ["..."]),
        ("? What", ["?", " What"]),
        (" \n\t\n ", []),
    ],
)
def test_boundaries(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@settings(deadline=None)
@given(st.text(st.sampled_from("ab.A!? \n\t…。\"')(é") | st.characters(codec="utf-8")))
@example("x " * LONGEST)
@example("y" * (3 * LONGEST + 1))
@example(" a" + " " * (2 * LONGEST) + "b")
def test_no_text_is_lost_and_no_sentence_is_empty_or_endless(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences).split() == text.split()
    assert all(0 < len(sentence) <= LONGEST for sentence in sentences)


def test_dot_leaders_and_long_runs_take_linear_time() -> None:
    assert "".join(split_sentences("." * 200_000)) == "." * 200_000
    assert "".join(split_sentences("a. " * 200_000)).split() == ["a."] * 200_000


def test_tokens_of_a_document_laid_end_to_end_are_its_text() -> None:
    tokenizer = small_tokenizer()
    for text, document in zip(DOCUMENTS, encode_documents(tokenizer, DOCUMENTS), strict=True):
        assert tokenizer.decode(document.tokens) == "".join(split_sentences(text))
        assert document.lengths.sum() == len(document.tokens)
        assert document.lengths.min() > 0
