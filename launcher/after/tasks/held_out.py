"""Divides tasks that are published in one piece into train, dev and test, by a hash of each text.

The division is the same on every machine. Equal texts go to the same split. SentEval's ten-fold cross-validation
becomes one such division.
"""

import hashlib
import json

from launcher.after.tasks.examples import Examples, Questions, Retrieval, Sentences, Tagged
from launcher.after.tasks.schema import Shares
from launcher.errors import TaskError


def division(examples: Examples, shares: Shares, split: str) -> Examples:
    """The part of all published `examples` that belongs to `split`: train, dev or test.

    Raises:
        TaskError: retrieval cannot be divided.
    """
    bounds = {"dev": (0.0, shares.dev), "test": (shares.dev, shares.dev + shares.test)}
    start, stop = bounds.get(split, (shares.dev + shares.test, 1.0))
    chosen = [index for index, text in enumerate(_texts(examples)) if start <= _position(text) < stop]
    match examples:
        case Sentences():
            second = examples.second
            return Sentences(
                tuple(examples.first[i] for i in chosen),
                None if second is None else tuple(second[i] for i in chosen),
                examples.labels[chosen],
            )
        case Tagged():
            return Tagged(tuple(examples.words[i] for i in chosen), tuple(examples.tags[i] for i in chosen))
        case Questions():
            return Questions(
                ids=tuple(examples.ids[i] for i in chosen),
                questions=tuple(examples.questions[i] for i in chosen),
                contexts=tuple(examples.contexts[i] for i in chosen),
                answers=tuple(examples.answers[i] for i in chosen),
            )
        case Retrieval():
            raise TaskError("retrieval is not divided", remedy="leave held_out out of the task")


def _texts(examples: Examples) -> list[str]:
    """What is hashed to choose an example's split: its texts; for a question, the context."""
    match examples:
        case Sentences():
            pairs = zip(examples.first, examples.second or [None] * len(examples), strict=True)
            return [json.dumps(pair) for pair in pairs]
        case Tagged():
            return [json.dumps(words) for words in examples.words]
        case Questions():
            return list(examples.contexts)
        case Retrieval():
            return []


def _position(text: str) -> float:
    """In [0, 1), evenly over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
