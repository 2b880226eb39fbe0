"""Frozen measures on tasks that have data of their own. They need only an encoder, whether of a run or of a folder.

Measures on a run's held-out text are in `launcher.diagnose.evaluate`.
"""

import hashlib
import json
from dataclasses import dataclass

from launcher.diagnose.anisotropy import anisotropy
from launcher.diagnose.figures import Figure
from launcher.diagnose.frozen import Frozen
from launcher.diagnose.linear_probe import Splits, linear_probe
from launcher.diagnose.similarity import similarity
from launcher.diagnose.states import rows_of_texts
from launcher.diagnose.task_data import probe_splits, similarity_pairs, texts_of
from launcher.recipe.evaluation import EvaluationTask
from launcher.tasks.examples import Sentences, digest


@dataclass(frozen=True)
class OwnData:
    """A task with its data read: those of a probe, of similarity, or texts to measure anisotropy on."""

    task: EvaluationTask
    data: Splits | Sentences | tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of what the figures depend on beside the model and the task's settings."""
        if isinstance(self.data, Splits):
            return hash_of([digest(part) for part in (self.data.train, self.data.dev, self.data.test)])
        return digest(self.data) if isinstance(self.data, Sentences) else hash_of(self.data)

    def figures(self, frozen: Frozen) -> list[Figure]:
        """Of this model. Raises as the measures do."""
        task = self.task
        if task.probe and isinstance(self.data, Splits):
            return linear_probe(frozen, self.data, task.probe.pooling)
        if task.similarity and isinstance(self.data, Sentences):
            return similarity(frozen, self.data, task.similarity.poolings)
        assert task.anisotropy
        assert isinstance(self.data, tuple)
        return anisotropy(frozen, rows_of_texts(frozen, self.data), task.anisotropy.poolings)


def own_data(task: EvaluationTask) -> OwnData | None:
    """Read a task's data. None for a task that is measured on a run's held-out text. Raises RunError, TaskError,
    StoreError, as `launcher.diagnose.task_data`."""
    if task.probe:
        return OwnData(task, probe_splits(task.probe))
    if task.similarity:
        return OwnData(task, similarity_pairs(task.similarity))
    if task.anisotropy and task.anisotropy.task:
        return OwnData(task, texts_of(task.anisotropy))
    return None


def hash_of(content: object) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
