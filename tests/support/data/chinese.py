# ruff: noqa: RUF001
"""Made-up Chinese: documents of words of one to four characters, and a WordPiece of characters for them."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.train import train_tokenizer

CHARACTERS = tuple(chr(0x4E00 + 7 * number) for number in range(120))
_MARKS = "，。！？"


@cache
def made_up_words(count: int = 300) -> tuple[str, ...]:
    """Different words; the first are the most frequent."""
    rng = np.random.default_rng(5)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(CHARACTERS, rng.integers(1, 5)))] = None
    return tuple(found)


def made_up_documents(count: int, seed: int = 0, words: int = 60) -> list[list[str]]:
    """Each a list of words, marks and a few Latin words among them."""
    rng = np.random.default_rng(seed)
    known = made_up_words()
    frequency = 1 / np.arange(1, len(known) + 1)
    documents = []
    for _ in range(count):
        drawn = [known[i] for i in rng.choice(len(known), words, p=frequency / frequency.sum())]
        for place in range(7, len(drawn), 8):
            drawn[place] = "models" if rng.random() < 0.2 else _MARKS[rng.integers(4)]
        documents.append(drawn)
    return documents


@cache
def chinese_tokenizer() -> Tokenizer:
    """WordPiece: a piece a Chinese character, Latin words in pieces."""
    texts = ["".join(words) for words in made_up_documents(60)] + ["".join(CHARACTERS)]
    return train_tokenizer("wordpiece", texts, 160, allow_fewer_ids=True)


def chinese_tokenizer_folder(folder: Path) -> str:
    save_tokenizer(chinese_tokenizer(), str(folder))
    return str(folder)


def write_words(path: Path, documents: list[list[str]]) -> Path:
    """JSON lines of `text` and `words`."""
    records = [{"text": "".join(words), "words": words} for words in documents]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path
