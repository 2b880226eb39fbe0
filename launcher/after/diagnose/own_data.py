"""Frozen measures on tasks with their own data, and the examples that they use. They only need an encoder, of a run or
of a folder.

Measures on a run's held-out text are in `launcher.after.diagnose.evaluate`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from launcher.after.diagnose.isotropy import anisotropy
from launcher.after.diagnose.measures import Splits, linear_probe, similarity
from launcher.after.diagnose.states import Frozen, rows_of_texts
from launcher.after.tasks.examples import Sentences, digest
from launcher.after.tasks.measurable import compared, measured_split, probed, with_texts
from launcher.after.tasks.task import Task
from launcher.errors import RunError
from launcher.runtime.recipe.evaluation import (
    AnisotropySettings,
    EvaluationTask,
    ProbeSettings,
    SimilaritySettings,
)
from launcher.runtime.run.evaluations import Figure


@dataclass(frozen=True)
class OwnData:
    """A task with its data: the splits of a probe, the pairs of similarity, or the texts of anisotropy."""

    task: EvaluationTask
    data: Splits | Sentences | tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the data on which the figures depend, beside the model and the task's settings."""
        if isinstance(self.data, Splits):
            return hash_of([digest(part) for part in (self.data.train, self.data.dev, self.data.test)])
        return digest(self.data) if isinstance(self.data, Sentences) else hash_of(self.data)

    def figures(self, frozen: Frozen) -> list[Figure]:
        """Return the figures of a model. Raises the errors of the measures."""
        task = self.task
        if task.probe and isinstance(self.data, Splits):
            return linear_probe(frozen, self.data, task.probe.pooling)
        if task.similarity and isinstance(self.data, Sentences):
            return similarity(frozen, self.data, task.similarity.poolings)
        assert task.anisotropy
        assert isinstance(self.data, tuple)
        return anisotropy(frozen, rows_of_texts(frozen, self.data), task.anisotropy.poolings)


def own_data(task: EvaluationTask) -> OwnData | None:
    """Read a task's data; return None for a task that is measured on a run's held-out text. Raises RunError, TaskError,
    StoreError as the functions below."""
    if task.probe:
        return OwnData(task, probe_splits(task.probe))
    if task.similarity:
        return OwnData(task, similarity_pairs(task.similarity))
    if task.anisotropy and task.anisotropy.task:
        return OwnData(task, texts_of(task.anisotropy))
    return None


def hash_of(content: object) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


SAMPLED_BY = 0
"""The seed of samples of a task's examples: the same ones for every run and checkpoint."""
_APART = 10  # one in so many examples of train, to choose the penalty by where dev is what is measured


def probe_splits(settings: ProbeSettings) -> Splits:
    """Return the splits of a classification task. Without a labelled test split the probe is measured on dev, and its
    penalty is chosen on a tenth of train.

    Raises:
        RunError: if the task is not classification.
        TaskError: if there is no such task, or its files do not fit its description.
    """
    task = probed(settings)
    train, dev = (_classified(task, split, settings.examples) for split in ("train", "dev"))
    if measured_split(task) == "test":
        return Splits(train, dev, _classified(task, "test", settings.examples))
    order = np.random.default_rng(SAMPLED_BY).permutation(len(train))
    apart = -(-len(train) // _APART)
    return Splits(select(train, order[apart:]), select(train, order[:apart]), dev)


def similarity_pairs(settings: SimilaritySettings) -> Sentences:
    """Return the test split if it is labelled, else dev, which is not used for any choice. Raises as `probe_splits`."""
    task = compared(settings)
    pairs = task.read(measured_split(task))
    if not isinstance(pairs, Sentences) or pairs.second is None:
        raise RunError(
            f"{task.name} has no pairs of texts with a score each", remedy="give a task of kind similarity"
        )
    return pairs


def texts_of(settings: AnisotropySettings) -> tuple[str, ...]:
    """Return the first texts of a task's dev split, or of test if there is no dev. Raises as `probe_splits`."""
    task = with_texts(settings)
    examples = task.read("dev" if "dev" in task.splits else measured_split(task))
    assert isinstance(examples, Sentences)  # of those kinds
    return at_most(examples, settings.texts).first


def _classified(task: Task, split: str, most: int) -> Sentences:
    examples = task.read(split)
    assert isinstance(examples, Sentences)  # of those kinds
    return at_most(examples, most)


def at_most(examples: Sentences, count: int) -> Sentences:
    """Return `count` of the examples, the same ones at every call; all examples if there are fewer."""
    if len(examples) <= count:
        return examples
    return select(examples, sorted(np.random.default_rng(SAMPLED_BY).permutation(len(examples))[:count]))


def select(examples: Sentences, chosen: Sequence[SupportsIndex] | np.ndarray) -> Sentences:
    """Return the examples at these indices, in that order."""
    places = [int(index) for index in chosen]
    first = tuple(examples.first[place] for place in places)
    second = None if examples.second is None else tuple(examples.second[place] for place in places)
    return Sentences(first, second, examples.labels[places])
