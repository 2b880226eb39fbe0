"""Loads the tasks on which a recipe's `evaluation.tasks` or `maskfleet diagnose` measure a frozen encoder, and checks
that the measures fit the kinds of tasks and that the files exist.

`maskfleet init` and `train` call `check_tasks` before training.
"""

from collections.abc import Sequence

from data_service.errors import UserError
from data_service.store.errors import StoreError
from launcher.after.tasks.schema import SCORED_KINDS, TaskKind
from launcher.after.tasks.task import Task, load_task
from launcher.errors import EVALUATE_EXTRA, RecipeError, RunError, TaskError, import_optional
from launcher.runtime.recipe.parts import EvaluationTask

# By name of a measure: the kinds of tasks that it can measure; for other kinds, the end of the message, and the remedy.
_MEASURABLE_KINDS: dict[str, tuple[tuple[TaskKind, ...], str, str]] = {
    "probe": (
        ("classification", "pair_classification"),
        "which a linear probe cannot measure",
        "name a classification task",
    ),
    "similarity": (
        SCORED_KINDS,
        "which has no pairs of texts with a score",
        "name a task of kind similarity",
    ),
}


def load_measured_task(measure: EvaluationTask) -> Task | None:
    """Return the task that a measure names; None if the measure is held-out loss. Raises TaskError if there is no such
    task, RunError if the measure cannot be used on tasks of its kind."""
    named = measure.named_task
    if named is None:
        return None
    task = load_task(named.task, named.data)
    kinds, why, remedy = _MEASURABLE_KINDS[measure.measure]
    if task.kind not in kinds:
        raise RunError(f"{task.name} is a task of the kind {task.kind}, {why}", remedy=remedy)
    return task


def splits_to_read(measure: EvaluationTask, task: Task) -> tuple[str, ...]:
    """Return the splits that a measure reads. The last is the measured split: test if it has labels, else dev. A probe
    also reads train, to be fitted, and dev, to choose its penalty."""
    measured = "test" if "test" in task.splits else "dev"
    return tuple(dict.fromkeys(("train", "dev", measured))) if measure.probe else (measured,)


def check_tasks(tasks: Sequence[EvaluationTask], *, with_files: bool = True) -> None:
    """Raise RecipeError, which names all mistakes, if a task that a recipe names does not exist, does not fit its
    measure or, with `with_files`, lacks files.

    Raises StoreError if a store does not answer, and with `with_files` MissingPackage if a measure needs a library
    that is not installed.
    """
    if with_files and any(task.probe or task.similarity for task in tasks):
        import_optional("sklearn", "a probe or similarity in evaluation.tasks", EVALUATE_EXTRA)
    found = [(index, measure, _measure_problem(measure, with_files=with_files)) for index, measure in enumerate(tasks)]
    problems = [(f"evaluation.tasks.{index}.{measure.measure}", *one) for index, measure, one in found if one]
    if problems:
        raise RecipeError(
            "\n".join(f"{place}.{field}: {error.problem}" for place, field, error in problems),
            remedy="; ".join(dict.fromkeys(error.remedy for _, _, error in problems)),
        )


def _measure_problem(measure: EvaluationTask, *, with_files: bool) -> tuple[str, UserError] | None:
    """Return the wrong field of a measure, and the error about it; None if the measure can be used."""
    field = "task"
    try:
        task = load_measured_task(measure)
        field = "data"
        if with_files and task is not None:
            _check_task_files(measure, task)
    except StoreError:
        raise
    except UserError as error:
        return field, error
    return None


def _check_task_files(measure: EvaluationTask, task: Task) -> None:
    if task.root is None:
        raise TaskError(
            f"the folder with the files of {task.name} is not given",
            remedy=f"set data to the folder or s3:// URI of the files, which are published at {task.published}",
        )
    for split in splits_to_read(measure, task):
        task.check_files(split)
