"""The measures of a cell: fine-tune a checkpoint on a task, or measure its vectors on a task of similarity or
retrieval. Also finds out, for the table, whether a model's corpora were searched for the task's texts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from checkpoints.hf.folder import PAIR_FOLDERS
from data_service.corpus.data_card import DataCard
from data_service.corpus.origin import IndexedSplit
from data_service.prepare.contamination import hash_text_set
from data_service.store.open import open_store
from launcher.after.embed.evaluate import VectorMeasureSettings, measure_checkpoint_vectors
from launcher.after.evaluate.cells import CellFigures, MeasureSpec, PlannedCell
from launcher.after.export.model_card import read_exported_cards, read_run_cards
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import DOCUMENT_WORDING, FinetuneSettings, TrainingDiverged, settings_grid
from launcher.after.tasks.summary import texts_of_task
from launcher.after.tasks.task import Task, task_digest
from launcher.errors import TaskError
from launcher.runtime.recipe.document import RecipeDocument, apply_assignments, validate
from launcher.runtime.run.record import RECORD_FILE, open_run

_VECTOR_TASK_KINDS = ("similarity", "retrieval")  # measured by a model's vectors, without fine-tuning


def plan_measures(tasks: Sequence[Task], assignments: Sequence[str]) -> list[MeasureSpec]:
    """Return a measure for each task and each combination of its settings. `assignments` (`KEY=VALUE`) replace the
    task's own settings.

    Tasks that are measured by vectors ignore settings that only fine-tuning has, and the other way round.

    Raises the errors of `task_digest`, which reads the data, and OptionError if settings are not allowed.
    """
    return [measure for task in tasks for measure in _task_measures(task, assignments)]


def _task_measures(task: Task, assignments: Sequence[str]) -> Iterable[MeasureSpec]:
    data = task_digest(task)
    if task.kind in _VECTOR_TASK_KINDS:
        own = _assignments_for(assignments, VectorMeasureSettings.model_fields, FinetuneSettings.model_fields)
        chosen = validate(
            VectorMeasureSettings,
            apply_assignments(RecipeDocument({}, task.name, {}, words=DOCUMENT_WORDING), own),
        )
        compute = partial(_compute_vector_cell, task=task, data=data, chosen=chosen)
        yield MeasureSpec("embed", task.name, task, data, chosen.model_dump(mode="json"), compute)
        return
    own = _assignments_for(assignments, FinetuneSettings.model_fields, VectorMeasureSettings.model_fields)
    given = apply_assignments(RecipeDocument(dict(task.finetune), task.name, {}), own).data
    for settings in settings_grid(given):
        plain = settings.model_dump(mode="json")
        compute = partial(_compute_finetune_cell, task=task, data=data, chosen=settings)
        yield MeasureSpec("finetune", task.name, task, data, plain, compute, seeded=True)


def _compute_finetune_cell(
    pretrained: LocalModel, seed: int, *, task: Task, data: str, chosen: FinetuneSettings
) -> CellFigures:
    """Fine-tune, and return the metrics on dev. If the training diverges, all metrics are None.

    `data`: digest of the task on the machine that planned the grid.

    Raises the errors of `finetune`, and TaskError if this machine has other data than that one.
    """
    _check_digest(task_digest(task), data, f"{task.name} at {task.root}")
    try:
        outcome = finetune(pretrained, task, chosen, seed)
    except TrainingDiverged as error:
        return CellFigures(metrics=dict.fromkeys(task.metrics), details={"diverged": error.problem})
    details = {name: value for name, value in outcome.as_record().items() if name != "metrics"}
    return CellFigures(metrics=_finite_or_none(outcome.metrics), details=details)


def _compute_vector_cell(
    pretrained: LocalModel, seed: int, *, task: Task, data: str, chosen: VectorMeasureSettings
) -> CellFigures:
    """Return the task's metrics. Raises the errors of `measure_checkpoint_vectors`, and TaskError as
    `_compute_finetune_cell`."""
    _check_digest(task_digest(task), data, f"{task.name} at {task.root}")
    return CellFigures(metrics=_finite_or_none(measure_checkpoint_vectors(pretrained, task, chosen)))


def _check_digest(local_digest: str, planned_digest: str, task_place: str) -> None:
    if local_digest != planned_digest:
        raise TaskError(
            f"the files of the task {task_place} on this machine are not the same as where the command runs",
            remedy="give every machine the same files: an s3:// URI or a shared folder as --data",
        )


def _finite_or_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics, with None for numbers that are not finite, such as the correlation of a constant."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _assignments_for(
    assignments: Sequence[str], own_settings: Iterable[str], other_settings: Iterable[str]
) -> list[str]:
    """Return the assignments without settings that only the other kind of measure has. Unknown settings are kept, so
    that validation rejects them."""
    only_theirs = set(other_settings) - set(own_settings)
    return [text for text in assignments if text.partition("=")[0].partition(".")[0] not in only_theirs]


def find_contamination_searches(planned_cells: Sequence[PlannedCell]) -> dict[str, dict[str, bool] | None]:
    """Return by cell key, for each split of the cell's task but `train`, whether all corpora of the cell's model were
    searched for the split's texts; None if the corpora are not known.

    The manifests of a run's corpora, or the data cards of an exported model, name the splits that were searched for,
    with digests of their texts. Raises the errors of `Task.read` and `open_run`.
    """
    models = {source: _searched_splits(source) for source in {work.cell.source for work in planned_cells}}
    known = [work for work in planned_cells if models[work.cell.source] is not None]
    tasks = {work.measure.data: work.measure.measured_task for work in known}
    digests = {data: _split_text_digests(task) for data, task in tasks.items()}
    found: dict[str, dict[str, bool] | None] = dict.fromkeys(work.cell.key for work in planned_cells)
    for work in known:
        texts = {split.digest for split in models[work.cell.source] or () if split.looked_up}
        found[work.cell.key] = {split: one in texts for split, one in digests[work.measure.data].items()}
    return found


def _searched_splits(source: str) -> Sequence[IndexedSplit] | None:
    """Return the splits whose texts were searched for in all corpora of a model; None if that is not known."""
    cards = _data_cards(source)
    if cards is None or None in cards.values():
        return None
    first, *others = (card.searched_splits for card in cards.values() if card is not None)
    return [split for split in first if all(split in other for other in others)]


def _data_cards(source: str) -> Mapping[str, DataCard | None] | None:
    """Return the data cards of the corpora of a run or an exported model, by source; None if it has none."""
    store = open_store(source)
    if store.size(RECORD_FILE) is not None:
        return read_run_cards(open_run(source))
    found = (read_exported_cards(place) for place in (store, store.with_prefix(PAIR_FOLDERS[1])))
    return next((cards for cards in found if cards), None)


def _split_text_digests(task: Task) -> dict[str, str]:
    """Return, for each split of a task but `train`, the digest of its texts."""
    texts: dict[str, list[str]] = {}
    for text in texts_of_task(task):
        texts.setdefault(text.split.removeprefix(f"{task.name}/"), []).append(text.text)
    return {split: hash_text_set(found) for split, found in texts.items()}
