"""Sentences about one of two topics, told apart by their words: what an embedding training can learn in seconds."""

import json
import random
from pathlib import Path

from small_runs import WORDS

TOPICS = (WORDS[: len(WORDS) // 2], WORDS[len(WORDS) // 2 :])


def sentence(draw: random.Random, topic: int) -> str:
    return " ".join(draw.choices(TOPICS[topic], k=draw.randint(3, 8)))


def scored(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Pairs: of one topic 5, of two topics 0; `relation` says the same in words."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        first, second = draw.randrange(2), draw.randrange(2)
        same = first == second
        rows.append(
            {
                "a": sentence(draw, first),
                "b": sentence(draw, second),
                "score": 5.0 * same,
                "relation": "same" if same else "other",
            }
        )
    return rows


def triplets(count: int, seed: int = 0) -> list[dict[str, object]]:
    """An anchor, a sentence of its topic, and one of the other's."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        topic = draw.randrange(2)
        texts = [sentence(draw, which) for which in (topic, topic, 1 - topic)]
        rows.append(dict(zip(("a", "p", "n"), texts, strict=True)))
    return rows


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
