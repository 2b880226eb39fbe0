"""Summarises a task's splits for the user, and yields their texts, for which training text is searched to find
contamination."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.prepare.contamination import EvaluationText
from launcher.after.tasks.examples import (
    Examples,
    Questions,
    Retrieval,
    Sentences,
    TaggedSentences,
    example_texts,
    examples_digest,
)
from launcher.after.tasks.metrics import check_metrics_defined
from launcher.after.tasks.task import Task


@dataclass(frozen=True)
class SplitSummary:
    """The summary of a split.

    Attributes:
        split: name of the split.
        examples: number of examples.
        repeated: number of examples whose text an earlier example has.
        in_train: number of examples whose text is also in the split train.
        median_length, longest: median and largest number of characters of an example, all its texts together.
        labels: description of the labels: share of each, or range of scores.
        digest: SHA-256 of the examples.
    """

    split: str
    examples: int
    repeated: int
    in_train: int
    median_length: int
    longest: int
    labels: str
    digest: str


def summarise_splits(task: Task) -> Iterator[SplitSummary]:
    """Yield the summary of every split with labels, one after another.

    Raises:
        TaskError: if a file is missing, a record cannot be used, or a split other than `train` cannot be measured.
    """
    train: frozenset[str] = frozenset()
    for split in task.splits:
        examples = task.read(split)
        if split != "train":
            check_metrics_defined(task, examples, f"the split {split}")
        texts = ["\n".join(parts) for parts in example_texts(examples)]
        different = frozenset(texts)
        lengths = [len(text) for text in texts]
        yield SplitSummary(
            split=split,
            examples=len(examples),
            repeated=len(texts) - len(different),
            in_train=sum(text in train for text in texts),
            median_length=int(np.median(lengths)),
            longest=max(lengths),
            labels=_label_shares_text(task, examples),
            digest=examples_digest(examples),
        )
        if split == "train":
            train = different


def _label_shares_text(task: Task, examples: Examples) -> str:
    match examples:
        case Sentences():
            if not task.labels:
                return f"{examples.labels.min():g} to {examples.labels.max():g}, mean {examples.labels.mean():.2f}"
            return _shares_text(Counter(task.labels[int(label)] for label in examples.labels))
        case TaggedSentences():
            return _shares_text(Counter(task.labels[tag] for tags in examples.tags for tag in tags))
        case Questions():
            without = sum(not answers for answers in examples.answers)
            return f"{without:,} of {len(examples):,} without an answer" if task.no_answer else "all have an answer"
        case Retrieval():
            judged = sum(len(found) for found in examples.relevant.values())
            return f"{len(examples.documents):,} documents, {judged / len(examples):.1f} relevant to a query"


def _shares_text(counts: Counter[str]) -> str:
    """Return the five most frequent labels with their shares. The first share is a constant prediction's accuracy."""
    total = counts.total()
    shown = [f"{label} {count / total:.1%}" for label, count in counts.most_common(5)]
    return ", ".join(shown) + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")


def texts_of_task(task: Task) -> Iterator[EvaluationText]:
    """Yield the texts of all splits of a task but `train`. Of a retrieval task, yield only the queries, not the
    documents. Raises as `Task.read`."""
    for split in task.splits:
        if split != "train":
            for column in zip(*example_texts(task.read(split)), strict=True):
                for number, text in enumerate(column):
                    yield EvaluationText(f"{task.name}/{split}", number, text)


def texts_of_file(path: str, text_field: str) -> Iterator[EvaluationText]:
    """Yield the documents of files that a corpus build reads.

    `text_field`: field of a JSON line, or column of a table, that holds the text. Raises InputError, StoreError.
    """
    options = BuildOptions(text_field=text_field)
    number = 0
    for split in plan_splits(list_inputs([path]).files, options):
        for found in read_documents(split, options):
            yield EvaluationText(path, number, found.text)
            number += 1
