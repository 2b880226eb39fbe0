"""Frozen measures on tasks with their own data, and the examples that they use. They only need an encoder, of a run or
of a folder.

Measures on a run's held-out text are in `launcher.after.diagnose.evaluate`.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from launcher.after.diagnose.isotropy import anisotropy
from launcher.after.diagnose.measures import Splits, linear_probe, similarity
from launcher.after.diagnose.states import FrozenEncoder, rows_of_texts
from launcher.after.tasks.examples import Sentences, digest, select
from launcher.after.tasks.measurable import named_task, splits_of
from launcher.after.tasks.task import Task
from launcher.runtime.recipe.evaluation import EvaluationTask
from launcher.runtime.run.evaluations import Figure

SAMPLING_SEED = 0
"""The seed of samples of a task's examples: the same ones for every run and checkpoint."""
_PENALTY_FOLD = 10  # one in so many examples of train, to choose the penalty by where dev is what is measured


@dataclass(frozen=True)
class OwnData:
    """A measure with the examples of its task: `train`, `dev` and `test` of a probe, else those that are measured."""

    measure: EvaluationTask
    task: Task
    data: tuple[Sentences, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the data on which the figures depend, beside the model and the task's settings."""
        return digest_of_json([digest(part) for part in self.data])

    def figures(self, frozen: FrozenEncoder) -> list[Figure]:
        """Return the figures of a model. Raises the errors of the measures."""
        measure = self.measure
        if measure.probe:
            return linear_probe(frozen, Splits(*self.data), measure.probe.pooling)
        if measure.similarity:
            return similarity(frozen, self.data[0], measure.similarity.poolings)
        assert measure.anisotropy  # the last that has a task
        return anisotropy(frozen, rows_of_texts(frozen, self.data[0].first), measure.anisotropy.poolings)


def read_own_data(measure: EvaluationTask) -> OwnData | None:
    """Read the data of a measure's task; return None for one on a run's held-out text.

    Without a labelled test split, a probe is measured on dev, and its penalty is chosen on a tenth of train. Raises the
    errors of `named_task` and `Task.read`.
    """
    task = named_task(measure)
    if task is None:
        return None
    parts = [task.read(split) for split in splits_of(measure, task)]
    examples = [part for part in parts if isinstance(part, Sentences)]
    assert len(examples) == len(parts)  # both have an entry for each task
    if measure.similarity:
        return OwnData(measure, task, (examples[0],))
    if measure.anisotropy:
        return OwnData(measure, task, (subsample(examples[0], measure.anisotropy.texts),))
    assert measure.probe  # the last that has a task
    train, *others = (subsample(part, measure.probe.examples) for part in examples)
    if len(others) == 2:
        return OwnData(measure, task, (train, *others))
    order = np.random.default_rng(SAMPLING_SEED).permutation(len(train))
    apart = -(-len(train) // _PENALTY_FOLD)
    return OwnData(measure, task, (select(train, order[apart:]), select(train, order[:apart]), *others))


def digest_of_json(content: object) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def subsample(examples: Sentences, count: int) -> Sentences:
    """Return `count` of the examples, the same ones at every call; all examples if there are fewer."""
    if len(examples) <= count:
        return examples
    return select(examples, np.sort(np.random.default_rng(SAMPLING_SEED).permutation(len(examples))[:count]))
