"""Measures one commit of a run by all tasks of its recipe. Independent of Ray and of training.

The weights are read into memory first, so the checkpoint may be deleted meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import CheckpointName
from checkpoints.listing import read_manifest
from data_service.errors import UserError as DataError
from data_service.store.errors import KeyMissing
from encoder_core.errors import UserError as ModelError
from launcher.after.diagnose.isotropy import anisotropy, heldout_sentences
from launcher.after.diagnose.measures import held_out
from launcher.after.diagnose.own_data import SAMPLED_BY, hash_of, own_data
from launcher.after.diagnose.states import Checkpoint, read_checkpoint
from launcher.runtime.recipe.evaluation import EvaluationTask
from launcher.runtime.run.evaluations import (
    DiagnosticCell,
    DiagnosticResult,
    Figure,
    read_result,
    write_commit,
    write_result,
)
from launcher.runtime.run.record import Run


@dataclass(frozen=True)
class CommitOutcome:
    """The outcome of evaluating a commit.

    Attributes:
        gone: whether the commit was deleted before it could be read.
        computed, known: names of the tasks that were measured now, and of those measured before.
        failed: reason why a task could not be measured, by the task's name, for the user.
    """

    gone: bool = False
    computed: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


def evaluate_commit(run: Run, mark: CheckpointName, tasks: Sequence[EvaluationTask]) -> CommitOutcome:
    """Make the missing measurements of a commit, and store each result at once. Raises DamagedCheckpoint, StoreError if
    the commit cannot be read or a result cannot be written."""
    checkpoint = _read(run, mark)
    if checkpoint is None:
        return CommitOutcome(gone=True)
    write_commit(run.store, mark, checkpoint.frozen.digest)
    return evaluate_checkpoint(checkpoint, tasks)


def evaluate_checkpoint(checkpoint: Checkpoint, tasks: Sequence[EvaluationTask]) -> CommitOutcome:
    """Measure weights in memory as `evaluate_commit` does. They need not be those of a commit. Raises StoreError."""
    outcome = CommitOutcome()
    for task in tasks:
        outcome = _evaluate(checkpoint, task, outcome)
    return outcome


def measure(checkpoint: Checkpoint, task: EvaluationTask) -> list[Figure]:
    """Return the figures of one task. Raises the errors of the measures."""
    return _Measure(checkpoint, task).figures()


def _read(run: Run, mark: CheckpointName) -> Checkpoint | None:
    """Read a commit; return None if it no longer exists."""
    try:
        return read_checkpoint(run, read_manifest(run.store, mark))
    except (DamagedCheckpoint, KeyMissing):
        if run.store.size(mark.manifest) is None:
            return None
        raise


def _evaluate(checkpoint: Checkpoint, task: EvaluationTask, outcome: CommitOutcome) -> CommitOutcome:
    """Measure one task. An error, such as missing data, does not stop the other tasks."""
    store, began = checkpoint.run.store, time.monotonic()
    try:
        found = _Measure(checkpoint, task)
        if read_result(store, found.cell) is not None:
            return replace(outcome, known=(*outcome.known, task.name))
        figures = tuple(found.figures())
    except (DataError, ModelError) as error:
        return replace(outcome, failed=outcome.failed | {task.name: error.problem})
    write_result(store, DiagnosticResult(cell=found.cell, figures=figures, seconds=time.monotonic() - began))
    return replace(outcome, computed=(*outcome.computed, task.name))


class _Measure:
    """A task with its data read, and so its cell."""

    def __init__(self, checkpoint: Checkpoint, task: EvaluationTask) -> None:
        self._checkpoint, self._task = checkpoint, task
        self._own = own_data(task)

    @property
    def cell(self) -> DiagnosticCell:
        weights, recipe = self._checkpoint.frozen.digest, self._checkpoint.run.recipe
        seed = recipe.seed if self._task.heldout else SAMPLED_BY
        data = self._heldout() if self._own is None else self._own.digest
        return DiagnosticCell(weights=weights, task=self._task, data=data, seed=seed)

    def figures(self) -> list[Figure]:
        checkpoint, frozen, task = self._checkpoint, self._checkpoint.frozen, self._task
        if self._own is not None:
            return self._own.figures(frozen)
        if task.anisotropy:
            rows = heldout_sentences(checkpoint.run, frozen, task.anisotropy.texts)
            return anisotropy(frozen, rows, task.anisotropy.poolings)
        assert task.heldout  # a task has exactly one measure
        return held_out(checkpoint, task.heldout.rows)

    def _heldout(self) -> str:
        """Return a digest of the corpora and of how they are cut and masked."""
        recipe = self._checkpoint.run.recipe
        inputs, last = self._checkpoint.run.record.inputs, recipe.phases[-1].length
        cut = [recipe.input.model_dump(mode="json"), recipe.objective.model_dump(mode="json"), last]
        return hash_of([inputs.corpora, inputs.tokenizer, cut])
