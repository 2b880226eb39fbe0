"""Measures a model's vectors: similarity (STS) with sentence-transformers' own evaluator, retrieval as BEIR does."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from pydantic import PositiveInt

from launcher.after.embed.model import library_module, load_model, show_progress, warn_of_truncation
from launcher.after.embed.retrieval import measure_retrieval
from launcher.after.embed.settings import Encoding
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.tasks.examples import Examples, Retrieval, Sentences
from launcher.after.tasks.task import Task
from launcher.errors import TaskError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class CellSettings(Encoding):
    """The settings of measuring a checkpoint's vectors on a task.

    Attributes:
        split: split of the task; None: dev if there is one, else test.
        batch: number of texts in a batch; it changes figures only by rounding.
    """

    split: str | None = None
    batch: PositiveInt = 32


def embed_cell(pretrained: LocalModel, task: Task, settings: CellSettings) -> dict[str, float]:
    """Return the task's metrics of a checkpoint's vectors. Raises the errors of `measure` and `load_model`."""
    examples = task.read(settings.split or ("dev" if "dev" in task.splits else "test"))
    return measure(load_model(pretrained, settings), task, examples, settings.batch)


def measure(
    model: "SentenceTransformer", task: Task, examples: Examples, batch: int = 32
) -> dict[str, float]:
    """Return the task's metrics, its main one first, from 0 to 1 (correlations from -1).

    Pairs with scores: Spearman's and Pearson's correlation of the cosine. Retrieval: as `embed/retrieval.py` says.

    Raises TaskError if the examples are of another kind, or all scores are equal; MissingPackage.
    """
    warn_of_truncation(model, _texts(examples), task.name)
    match examples:
        case Sentences() if examples.second is not None and examples.labels.dtype == np.float64:
            with show_progress(model, f"measuring {task.name}", 2 * len(examples)):
                found = _similarity(model, task, examples, batch)
        case Retrieval():
            if not examples.queries:
                raise TaskError(f"{task.name} has no query that is judged", remedy="check its qrels")
            found = measure_retrieval(model, examples, batch)
        case _:
            raise TaskError(
                f"the task {task.name} is of the kind {task.kind}, which vectors by themselves do not answer",
                remedy="name a task of the kind similarity or retrieval, or use maskfleet finetune",
            )
    return {metric: found[metric] for metric in task.metrics}


def _texts(examples: Examples) -> Iterator[str]:
    match examples:
        case Sentences():
            yield from examples.first
            yield from examples.second or ()
        case Retrieval():
            yield from examples.documents.values()


def _similarity(
    model: "SentenceTransformer", task: Task, examples: Sentences, batch: int
) -> dict[str, float]:
    scores = examples.labels.tolist()
    if len(set(scores)) < 2:
        raise TaskError(
            f"{task.name}: all scores are {scores[0]:g}, so nothing correlates with them",
            remedy="measure on a split with several scores",
        )
    evaluator = library_module("evaluation").EmbeddingSimilarityEvaluator(
        list(examples.first),
        list(examples.second or ()),
        scores,
        batch_size=batch,
        main_similarity="cosine",
        write_csv=False,
    )
    found = evaluator(model)
    # Vectors that are all the same have no correlation with anything: such a model knows nothing.
    return {name: float(np.nan_to_num(found[f"{name}_cosine"], nan=0.0)) for name in ("spearman", "pearson")}
