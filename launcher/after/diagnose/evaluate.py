"""Measures one commit of a run by all tasks of its recipe. Independent of Ray and of training.

The weights are read into memory first, so the checkpoint may be deleted meanwhile.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import CheckpointName
from checkpoints.listing import read_manifest
from data_service.errors import UserError as DataError
from data_service.store.errors import KeyMissing
from encoder_core.errors import UserError as ModelError
from launcher.after.diagnose.isotropy import anisotropy, heldout_sentences
from launcher.after.diagnose.measures import SAMPLING_SEED, OwnData, digest_of_json, held_out, read_own_data
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
    """Make the missing measurements of a commit, and store each result at once. An error of one, such as missing data,
    does not stop the others. Raises DamagedCheckpoint, StoreError if the commit cannot be read or a result cannot be
    written."""
    checkpoint = _read(run, mark)
    if checkpoint is None:
        return CommitOutcome(gone=True)
    write_commit(run.store, mark, checkpoint.frozen.digest)
    computed, known, failed = list[str](), list[str](), dict[str, str]()
    for task in tasks:
        began = time.monotonic()
        try:
            own = read_own_data(task)
            cell = _cell(checkpoint, task, own)
            if read_result(run.store, cell) is not None:
                known.append(task.name)
                continue
            figures = tuple(_figures(checkpoint, task, own))
        except (DataError, ModelError) as error:
            failed[task.name] = error.problem
            continue
        seconds = time.monotonic() - began
        write_result(run.store, DiagnosticResult(cell=cell, figures=figures, seconds=seconds))
        computed.append(task.name)
    return CommitOutcome(computed=tuple(computed), known=tuple(known), failed=failed)


def _read(run: Run, mark: CheckpointName) -> Checkpoint | None:
    """Read a commit; return None if it no longer exists."""
    try:
        return read_checkpoint(run, read_manifest(run.store, mark))
    except (DamagedCheckpoint, KeyMissing):
        if run.store.size(mark.manifest) is None:
            return None
        raise


def _cell(checkpoint: Checkpoint, task: EvaluationTask, own: OwnData | None) -> DiagnosticCell:
    run, recipe = checkpoint.run, checkpoint.run.recipe
    if own is not None:
        data = own.digest
    else:  # corpora, and how they are cut and masked
        inputs, last = run.record.inputs, recipe.phases[-1].length
        cut = [recipe.input.model_dump(mode="json"), recipe.objective.model_dump(mode="json"), last]
        data = digest_of_json([inputs.corpora, inputs.tokenizer, cut])
    seed = recipe.seed if task.heldout else SAMPLING_SEED
    return DiagnosticCell(weights=checkpoint.frozen.digest, task=task, data=data, seed=seed)


def _figures(checkpoint: Checkpoint, task: EvaluationTask, own: OwnData | None) -> list[Figure]:
    if own is not None:
        return own.figures(checkpoint.frozen)
    if task.anisotropy:
        rows = heldout_sentences(checkpoint.run, checkpoint.frozen, task.anisotropy.texts)
        return anisotropy(checkpoint.frozen, rows, task.anisotropy.poolings)
    assert task.heldout  # a task has exactly one measure
    return held_out(checkpoint, task.heldout.rows)
