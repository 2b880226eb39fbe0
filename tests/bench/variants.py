"""Near copies of texts, of the kinds that real corpora hold."""

import random
from collections.abc import Callable

Draw = Callable[[str, str, random.Random], str]


def _one_word(text: str, _: str, drawn: random.Random) -> str:
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if word.strip()]
    words[drawn.choice(places)] = f"replaced{drawn.randrange(10**6)}"
    return " ".join(words)


def _line_added(text: str, _: str, drawn: random.Random) -> str:
    return f"Posted on day {drawn.randrange(10**6)} by reader {drawn.randrange(10**6)}\n{text}"


def _appended(text: str, other: str, _: random.Random) -> str:
    return f"{text} {' '.join(other.split()[:12])}."


def _few_words(text: str, _: str, drawn: random.Random) -> str:
    return " ".join(
        f"replaced{drawn.randrange(10**6)}" if drawn.random() < 0.05 else word for word in text.split(" ")
    )


def _first_half(text: str, _: str, __: random.Random) -> str:
    return text[: len(text) // 2]


def _second_half(text: str, _: str, __: random.Random) -> str:
    return text[len(text) // 2 :]


def _embedded(text: str, other: str, _: random.Random) -> str:
    half = len(other) // 2
    return f"{other[:half]}\n\n{text}\n\n{other[half:]}"


VARIANTS: dict[str, Draw] = {
    "one word changed": _one_word,
    "one line added": _line_added,
    "sentence appended": _appended,
    "one word in 20 changed": _few_words,
    "first half": _first_half,
    "second half": _second_half,
    "contained in a longer one": _embedded,
}
