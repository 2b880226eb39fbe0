"""A task's examples, one class for each kind of task: plain data, read once, the same for every model.

Tasks that are published without splits are divided into train, dev and test by a hash of each text. The division is the
same on every machine, and equal texts go to the same split. It replaces SentEval's ten-fold cross-validation.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.after.tasks.schema import SplitShares


@dataclass(frozen=True)
class Sentences:
    """N texts, or pairs of texts, each with one label. Kinds: classification, pair_classification, regression and
    similarity.

    Attributes:
        first: the texts.
        second: the second text of each pair; None if the task has single texts.
        labels: [N] int64 indices into the task's labels, or float64 scores.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: NDArray[np.int64] | NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class TaggedSentences:
    """N sentences cut into words, each word with a tag. Kind: tagging.

    Attributes:
        words: words of each sentence.
        tags: a tag for each word of each sentence: indices into the task's labels.
    """

    words: tuple[tuple[str, ...], ...]
    tags: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class Answer:
    """An answer: its text, and the index of its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True)
class Questions:
    """N questions, each about a context. Kind: span.

    Attributes:
        ids: ids of the questions in the file, by which predictions are keyed.
        questions, contexts: their texts.
        answers: accepted answers to each question; empty if the context does not answer it.
    """

    ids: tuple[str, ...]
    questions: tuple[str, ...]
    contexts: tuple[str, ...]
    answers: tuple[tuple[Answer, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Retrieval:
    """Queries, the documents to search, and the relevant documents of each query. Kind: retrieval.

    Attributes:
        queries, documents: texts by id.
        relevant: for each query, the grades (1 or more) of the relevant documents, by their ids; empty if none is.
    """

    queries: Mapping[str, str]
    documents: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, int]]

    def __len__(self) -> int:
        return len(self.queries)


Examples = Sentences | TaggedSentences | Questions | Retrieval
Rows = TypeVar("Rows", bound=Sentences | TaggedSentences | Questions)


def example_texts(examples: Examples) -> list[tuple[str, ...]]:
    """Return the texts of each example; of a retrieval task, the texts of the queries."""
    match examples:
        case Sentences():
            columns = (examples.first,) if examples.second is None else (examples.first, examples.second)
            return list(zip(*columns, strict=True))
        case TaggedSentences():
            return [(" ".join(words),) for words in examples.words]
        case Questions():
            return list(zip(examples.questions, examples.contexts, strict=True))
        case Retrieval():
            return [(query,) for query in examples.queries.values()]


def examples_digest(examples: Examples) -> str:
    """Return the SHA-256 of the examples and their order. Names and formats of the files do not change it."""
    content = asdict(examples)
    if isinstance(examples, Sentences):
        content["labels"] = examples.labels.tolist()
    data = json.dumps([type(examples).__name__, content], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()


def select_examples(examples: Rows, indices: Sequence[int] | NDArray[np.int64]) -> Rows:
    """Return the examples at these indices, in that order."""
    return type(examples)(**{name: _select_column(column, indices) for name, column in vars(examples).items()})


def _select_column(column: Any, indices: Sequence[int] | NDArray[np.int64]) -> Any:
    if column is None or isinstance(column, np.ndarray):
        return column if column is None else column[indices]
    return tuple(column[index] for index in indices)


def select_hashed_split(examples: Examples, shares: SplitShares, split: str) -> Examples:
    """Return the part of all published `examples` that belongs to `split` (train, dev or test) by its texts' hashes."""
    assert not isinstance(examples, Retrieval), "task_issues rejects held_out for retrieval"
    bounds = {"dev": (0.0, shares.dev), "test": (shares.dev, shares.dev + shares.test)}
    start, stop = bounds.get(split, (shares.dev + shares.test, 1.0))
    return select_examples(
        examples,
        [index for index, text in enumerate(_split_hash_texts(examples)) if start <= _hash_fraction(text) < stop],
    )


def _split_hash_texts(examples: Sentences | TaggedSentences | Questions) -> list[str]:
    """Return for each example the text whose hash chooses the split: all texts; of a question only the context."""
    match examples:
        case Sentences():
            pairs = zip(examples.first, examples.second or [None] * len(examples), strict=True)
            return [json.dumps(pair) for pair in pairs]
        case TaggedSentences():
            return [json.dumps(words) for words in examples.words]
        case Questions():
            return list(examples.contexts)


def _hash_fraction(text: str) -> float:
    """Return a hash of the text as a number in [0, 1). Over many texts it is distributed uniformly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
