# ruff: noqa: RUF001
"""Made-up text: documents of a few words, for small runs; sentences of several scripts, with their marks and spaces."""

import json
import random
from functools import cache
from pathlib import Path

WORDS = [
    "a", "rank", "reads", "its", "rows", "and", "every", "step", "is", "the", "same", "on",
    "any", "machine", "while", "loss", "falls", "workers", "die", "come", "back", "nothing", "lost",
]  # fmt: skip

# First and last code point of what words are made of, length of a word, what ends a sentence, space between words.
SCRIPTS: dict[str, tuple[str, str, tuple[int, int], str, str]] = {
    "han": ("一", "丿", (1, 2), "。！？", ""),
    "kana": ("あ", "ん", (1, 4), "。？", ""),
    "thai": ("ก", "ฮ", (2, 6), " ", ""),
    "hangul": ("가", "갷", (1, 4), ".?", " "),
    "devanagari": ("क", "ह", (2, 6), "।॥", " "),
    "arabic": ("ا", "ي", (2, 6), ".؟۔", " "),
    "armenian": ("ա", "ֆ", (2, 6), "։", " "),
    "ethiopic": ("ሀ", "ሏ", (2, 4), "።፧", " "),
    "cyrillic": ("а", "я", (2, 8), ".!", " "),
    "latin": ("a", "z", (2, 8), ".!?", " "),
}


def write_text(path: Path, documents: int = 30, seed: int = 3) -> None:
    """JSON lines of made-up documents of a few sentences each."""
    draw = random.Random(seed)
    with path.open("w") as lines:
        for _ in range(documents):
            sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 8))) for _ in range(draw.randint(2, 4))]
            lines.write(json.dumps({"text": ". ".join(sentences) + "."}) + "\n")


@cache
def scripts_text(seed: int, script: str = "han", sentences: int = 4) -> str:
    """A line of so many sentences; one word in ten is Latin."""
    rng = random.Random(f"{script} {seed}")
    return _line(rng, script, sentences)


def _line(rng: random.Random, script: str, sentences: int) -> str:
    first, last, lengths, ends, space = SCRIPTS[script]
    parts = []
    for _ in range(sentences):
        words = [_word(rng, first, last, lengths) for _ in range(rng.randint(3, 12))]
        gap = " " if space or rng.random() < 0.2 else ""
        parts.append(space.join(words).capitalize() + rng.choice(ends) + gap)
    return "".join(parts).strip()


def _word(rng: random.Random, first: str, last: str, lengths: tuple[int, int]) -> str:
    if rng.random() < 0.1:
        return rng.choice(["Python", "GPU", "2024", "naïve", "v3.5", "(x)"])
    return "".join(chr(rng.randint(ord(first), ord(last))) for _ in range(rng.randint(*lengths)))
