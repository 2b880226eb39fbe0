"""Real English text that every machine has, and one small tokenizer of each kind trained on it."""

import pydoc_data.topics
from collections.abc import Callable
from functools import cache

import pytest

from data_service.tokenizers.tokenizer import Kind, Tokenizer
from data_service.tokenizers.train import train_tokenizer

KINDS: tuple[Kind, ...] = ("byte_bpe", "wordpiece", "unigram", "bpe")

# What English prose lacks: scripts without spaces, accents, emoji joined from several, ligatures, odd space.
ODD_LINES = (
    "日本語のテキスト mixed 한국어 with latin",
    "naïve café Straße ﬁne ½ ①",
    "emoji 😀 👩‍👩‍👧 🇩🇪 end",
    "  two  spaces\tand a tab ",
    "zero\u200bwidth and nbsp\u00a0here",
    "x" * 300,
    "",
    "   ",
)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """The first 60 of pydoc's topics: Python's language reference, 400 kB."""
    return [topic for _, topic in sorted(pydoc_data.topics.topics.items())][:60]


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """Lines that the tokenizers were not trained on, and odd ones."""
    topics = [topic for _, topic in sorted(pydoc_data.topics.topics.items())][60:]
    return [line for topic in topics for line in topic.splitlines()] + list(ODD_LINES)


@pytest.fixture(scope="session")
def trained(documents: list[str]) -> Callable[[Kind], Tokenizer]:
    """A tokenizer of a kind with 1,500 ids."""
    return cache(lambda kind: train_tokenizer(kind, documents, 1500))


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, trained: Callable[[Kind], Tokenizer]) -> Tokenizer:
    return trained(request.param)
