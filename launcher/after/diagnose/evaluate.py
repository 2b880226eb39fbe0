"""Measures a commit (committed checkpoint) of a run on all evaluation tasks of the run's recipe; or, for `maskfleet
diagnose`, a run's or a folder's model on the tasks that the user names. No running training is needed, and no Ray.

Weights are read into memory first, so the checkpoint may be deleted meanwhile.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import CheckpointName
from checkpoints.listing import read_manifest
from data_service.errors import UserError as DataError
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from encoder_core.errors import UserError as ModelError
from launcher.after.diagnose.measures import (
    SAMPLING_SEED,
    TaskData,
    digest_of_json,
    measure_heldout_loss,
    read_task_data,
)
from launcher.after.diagnose.states import Checkpoint, open_checkpoint, open_frozen_encoder, read_checkpoint
from launcher.after.tasks.schema import SCORED_KINDS
from launcher.after.tasks.task import load_task
from launcher.errors import OptionError
from launcher.runtime.recipe.parts import EvaluationTask, HeldOutSettings, Pooling, ProbeSettings, SimilaritySettings
from launcher.runtime.run.evaluations import (
    DiagnosticCell,
    DiagnosticResult,
    Figure,
    read_result,
    write_commit_weights,
    write_result,
)
from launcher.runtime.run.record import RECORD_FILE, Run, open_run


@dataclass(frozen=True)
class CommitOutcome:
    """The outcome of evaluating a commit.

    Attributes:
        gone: whether the commit was deleted before it could be read.
        computed, known: names of the tasks that were measured now, and of the tasks that had results before.
        failed: reason why a task could not be measured, for the user, by the task's name.
    """

    gone: bool = False
    computed: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


def evaluate_commit(run: Run, checkpoint_name: CheckpointName, tasks: Sequence[EvaluationTask]) -> CommitOutcome:
    """Measure a commit on each task that has no stored result for it, and store each result at once. An error on one
    task, such as missing data, does not stop the others. Raises DamagedCheckpoint, StoreError if the commit cannot be
    read or a result cannot be written."""
    checkpoint = _read_if_kept(run, checkpoint_name)
    if checkpoint is None:
        return CommitOutcome(gone=True)
    write_commit_weights(run.store, checkpoint_name, checkpoint.frozen.digest)
    computed, known, failed = list[str](), list[str](), dict[str, str]()
    for task in tasks:
        began = time.monotonic()
        try:
            own = read_task_data(task)
            cell = _diagnostic_cell(checkpoint, task, own)
            if read_result(run.store, cell) is not None:
                known.append(task.name)
                continue
            figures = tuple(_measure_figures(checkpoint, task, own))
        except (DataError, ModelError) as error:
            failed[task.name] = error.problem
            continue
        seconds = time.monotonic() - began
        write_result(run.store, DiagnosticResult(cell=cell, figures=figures, seconds=seconds))
        computed.append(task.name)
    return CommitOutcome(computed=tuple(computed), known=tuple(known), failed=failed)


def _read_if_kept(run: Run, checkpoint_name: CheckpointName) -> Checkpoint | None:
    """Read a commit; return None if it no longer exists."""
    try:
        return read_checkpoint(run, read_manifest(run.store, checkpoint_name))
    except (DamagedCheckpoint, KeyMissing):
        if run.store.size(checkpoint_name.manifest_key) is None:
            return None
        raise


def _diagnostic_cell(checkpoint: Checkpoint, task: EvaluationTask, task_data: TaskData | None) -> DiagnosticCell:
    """Return the identity under which a checkpoint's result on a task is stored."""
    run, recipe = checkpoint.run, checkpoint.run.recipe
    if task_data is not None:
        data = task_data.digest
    else:  # held-out loss: it depends on the run's corpora, and on how they are cut and masked
        inputs, last = run.record.inputs, recipe.phases[-1].length
        cut = [recipe.input.model_dump(mode="json"), recipe.objective.model_dump(mode="json"), last]
        data = digest_of_json([inputs.corpora, inputs.tokenizer, cut])
    seed = recipe.seed if task.heldout else SAMPLING_SEED
    return DiagnosticCell(weights=checkpoint.frozen.digest, task=task, data=data, seed=seed)


def _measure_figures(checkpoint: Checkpoint, task: EvaluationTask, task_data: TaskData | None) -> list[Figure]:
    if task_data is not None:
        return task_data.measure_encoder(checkpoint.frozen)
    assert task.heldout  # only held-out loss has no task data
    return measure_heldout_loss(checkpoint, task.heldout.rows)


@dataclass(frozen=True)
class Diagnosis:
    """The figures (measured numbers) of one task, with a title for the user."""

    title: str
    task: str
    figures: Sequence[Figure]

    def records(self) -> list[dict[str, object]]:
        """Return the figures as plain data, for programs."""
        return [{"task": self.task} | figure.model_dump() for figure in self.figures]


def diagnose_checkpoint(
    source: str,
    step: int | None,
    *,
    tasks: Sequence[str],
    data: str | None,
    poolings: list[Pooling],
    limit: int,
) -> Iterator[Diagnosis]:
    """Measure held-out loss, if `source` is a run, and then the tasks; yield the figures of each in turn.

    Args:
        tasks: names or YAML files of tasks.
        data: folder or s3:// URI with the files of the tasks.
        poolings: ways to pool a text's hidden states to one vector. Each is measured.
        limit: largest number of examples of a split that a probe uses.

    Raises OptionError if there is nothing to measure; and the errors of `open_frozen_encoder` and `load_task`.
    """
    is_run = open_store(source).size(RECORD_FILE) is not None
    if not is_run and not tasks:
        raise OptionError(f"{source} is a model's folder, without held-out text", remedy="name a task: --task NAME")
    checkpoint = open_checkpoint(open_run(source), step) if is_run else None
    frozen = checkpoint.frozen if checkpoint else open_frozen_encoder(source, step)
    if checkpoint is not None:
        figures = measure_heldout_loss(checkpoint, HeldOutSettings().rows)
        yield Diagnosis(f"Held-out loss of {frozen.name}", "heldout", figures)
    for name in tasks:
        parts = [
            part for measure in _evaluation_tasks(name, data, poolings, limit) if (part := read_task_data(measure))
        ]
        figures = [figure for part in parts for figure in part.measure_encoder(frozen)]
        yield Diagnosis(_diagnosis_title(parts[0]), parts[0].task.name, figures)


def _evaluation_tasks(name: str, data: str | None, poolings: list[Pooling], limit: int) -> Iterator[EvaluationTask]:
    """Yield the measures of a task: similarity if it has scores, else a probe for each pooling."""
    if load_task(name, data).kind in SCORED_KINDS:
        scored = SimilaritySettings(task=name, data=data, poolings=poolings)
        yield EvaluationTask(similarity=scored)
        return
    for pooling in poolings:
        probe = ProbeSettings(task=name, data=data, examples=limit, pooling=pooling)
        yield EvaluationTask(probe=probe)


def _diagnosis_title(task_data: TaskData) -> str:
    if task_data.measure.similarity:
        return f"{task_data.task.name}: {len(task_data.examples[0]):,} pairs"
    train, _, test = task_data.examples
    return f"{task_data.task.name}: linear probe fitted on {len(train):,} examples, measured on {len(test):,}"
