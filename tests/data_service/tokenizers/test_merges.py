"""Merges are those that the trainer of `tokenizers` learns from the text, however large the counts are."""

import json
from collections import Counter
from random import Random

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data_service.tokenizers.merges import WORD_END_SYMBOL, learn_merges

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
Learnt = tuple[list[str], list[tuple[str, str]]]


def by_library(texts: list[str], vocab_size: int, min_frequency: int) -> Learnt:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        initial_alphabet=ALPHABET,
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [(a, b) for a, b in model["merges"]]


def by_counts(texts: list[str], vocab_size: int, min_frequency: int, times: int = 1) -> Learnt:
    counts = Counter(word for text in texts for word in text.split())
    pieces = ["<s>", *ALPHABET]
    ids = {piece: index for index, piece in enumerate(pieces)}
    symbols = [symbol for word in counts for symbol in (*(ids[letter] for letter in word), WORD_END_SYMBOL)]
    return learn_merges(
        np.array(symbols, np.int32),
        np.array(list(counts.values()), np.int64) * times,
        pieces,
        vocab_size=vocab_size,
        min_frequency=min_frequency * times,
    )


def hostile(random: Random) -> list[str]:
    """Few letters: pairs overlap themselves, and several merges spell one piece."""
    letters, longest = random.choice(["a", "ab", "abc", "abcdefgh"]), random.choice([3, 8, 30])
    words = ["".join(random.choices(letters, k=random.randint(1, longest))) for _ in range(500)]
    return [" ".join(random.choices(words, k=random.randint(1, 200))) for _ in range(4)]


@pytest.mark.parametrize("followed", [0, 1 << 22])
def test_merges_are_the_librarys(followed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_service.tokenizers.merges._MAX_SYMBOLS_WITH_ALL_PAIRS", followed)
    for seed in range(60):
        random = Random(seed)
        texts, size, frequency = hostile(random), random.choice([270, 300, 2000]), random.choice([1, 2, 3])
        assert by_counts(texts, size, frequency) == by_library(texts, size, frequency), seed


def test_counts_may_exceed_what_the_library_can_count(documents: list[str]) -> None:
    """Its sums of a pair are 32 bits wide; counts that are 2^40 times as high give the same merges here."""
    texts = ["".join(letter for letter in document if letter in ALPHABET or letter == " ") for document in documents]
    assert by_counts(texts, 2000, 2, 1 << 40) == by_counts(texts, 2000, 2) == by_library(texts, 2000, 2)
