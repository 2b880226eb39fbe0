"""A task's examples, kind by kind: plain data, read once, the same for every model."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray


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
