"""A task's examples, kind by kind: plain data, read once, the same for every model.

Tasks that are published in one piece are divided into train, dev and test by a hash of each text. The division is the
same on every machine. Equal texts go to the same split. SentEval's ten-fold cross-validation becomes one such division.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.after.tasks.schema import Shares
from launcher.errors import TaskError


@dataclass(frozen=True)
class Sentences:
    """N texts, or pairs of texts, each with one label. Kinds: classification, pair_classification, regression and
    similarity.

    Attributes:
        first: the texts.
        second: the texts beside them; None where a task has one text.
        labels: [N] int64 indices into the task's labels, or float64 scores.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: NDArray[np.int64] | NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Tagged:
    """N sentences cut into words, each word with a tag. Kind: tagging.

    Attributes:
        words: of each sentence.
        tags: indices into the task's labels, as many as words.
    """

    words: tuple[tuple[str, ...], ...]
    tags: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Answer:
    """`text`, and the character of the context at which it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class Questions:
    """N questions, each about a context. Kind: span.

    Attributes:
        ids: names in the file; predictions are keyed by them.
        questions, contexts: texts.
        answers: accepted ones; none: the context does not answer the question.
    """

    ids: tuple[str, ...]
    questions: tuple[str, ...]
    contexts: tuple[str, ...]
    answers: tuple[tuple[Answer, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Retrieval:
    """Queries, the documents to find, and which are right. Kind: retrieval.

    Attributes:
        queries, documents: texts by id.
        relevant: of each query, documents' ids and how relevant each is (1 and more).
    """

    queries: Mapping[str, str]
    documents: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, int]]

    def __len__(self) -> int:
        return len(self.queries)


Examples = Sentences | Tagged | Questions | Retrieval


def digest(examples: Examples) -> str:
    """SHA-256 of the content: whatever the files were called, the same examples in the same order, the same digest."""
    content = asdict(examples)
    if isinstance(examples, Sentences):
        content["labels"] = examples.labels.tolist()
    data = json.dumps([type(examples).__name__, content], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()


def division(examples: Examples, shares: Shares, split: str) -> Examples:
    """Return the part of all published `examples` that belongs to `split`: train, dev or test.

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
    """Return what is hashed to choose an example's split: its texts; for a question, the context."""
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
