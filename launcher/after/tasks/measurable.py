"""Loads the tasks that frozen measures name, of a recipe or a suite, and checks that their kind can be measured and
their files exist.

`maskfleet init` and `train` call this before training.
"""

from collections.abc import Iterator, Sequence

from data_service.errors import UserError
from data_service.store.errors import StoreError
from launcher.after.tasks.schema import SCORED, TEXTS, Kind
from launcher.after.tasks.task import Task, load_task
from launcher.errors import EVALUATE, RecipeError, RunError, TaskError, optional
from launcher.runtime.recipe.evaluation import EvaluationTask
from launcher.runtime.recipe.parts import RecipeIssue

_MEASURABLE_KINDS: dict[str, tuple[tuple[Kind, ...], str, str]] = {
    "probe": (
        ("classification", "pair_classification"),
        "which no linear probe measures",
        "name a classification task",
    ),
    "similarity": (SCORED, "which has no pairs of texts with a score each", "name a task of kind similarity"),
    "anisotropy": (TEXTS, "which has no texts for it", "name a task of classification or similarity"),
}  # by measure: kinds of tasks that it can measure; why it cannot measure others, and the remedy


def named_task(measure: EvaluationTask) -> Task | None:
    """Return the task that a measure names; None if it is measured on a run's held-out text. Raises TaskError if there
    is no such task, RunError if its kind cannot be measured so."""
    named = measure.named_task
    if named is None or named.task is None:
        return None
    task = load_task(named.task, named.data)
    kinds, why, remedy = _MEASURABLE_KINDS[measure.measure]
    if task.kind not in kinds:
        raise RunError(f"{task.name} is a task of {task.kind}, {why}", remedy=remedy)
    return task


def splits_of(measure: EvaluationTask, task: Task) -> tuple[str, ...]:
    """Return the splits that a measure reads: the one on which figures are measured, which is the last (test if it is
    labelled, else dev); before it those of a probe that is fitted and chosen."""
    measured = "test" if "test" in task.splits else "dev"
    if measure.probe:
        return tuple(dict.fromkeys(("train", "dev", measured)))
    return ("dev",) if measure.anisotropy and "dev" in task.splits else (measured,)


def check_names(tasks: Sequence[EvaluationTask]) -> None:
    """Raise RecipeError if a task that a recipe names does not exist, or does not fit its measure."""
    _refuse([problem for index, task in enumerate(tasks) for problem in _name_problems(index, task)])


def check_tasks(tasks: Sequence[EvaluationTask]) -> None:
    """Check as `check_names`, and that the files of the tasks exist. Raises StoreError if a store does not answer, and
    MissingPackage if a measure needs a library that is not installed."""
    check_names(tasks)
    if any(task.probe or task.similarity for task in tasks):
        optional("sklearn", "a probe, or similarity, of a recipe's evaluation.tasks", EVALUATE)
    _refuse([problem for index, task in enumerate(tasks) for problem in _file_problems(index, task)])


def _refuse(problems: Sequence[RecipeIssue]) -> None:
    if problems:
        raise RecipeError(
            "\n".join(f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in problems),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )


def _name_problems(index: int, measure: EvaluationTask) -> Iterator[RecipeIssue]:
    try:
        named_task(measure)
    except StoreError:
        raise
    except UserError as error:
        yield RecipeIssue(_path(index, measure, "task"), error.problem, error.remedy)


def _file_problems(index: int, measure: EvaluationTask) -> Iterator[RecipeIssue]:
    task = named_task(measure)
    if task is None:
        return
    path = _path(index, measure, "data")
    if task.root is None:
        what = f"the folder with the files of {task.name} is not given"
        remedy = f"set data to the folder or s3:// URI of the files, which are published at {task.published}"
        yield RecipeIssue(path, what, remedy)
        return
    for split in splits_of(measure, task):
        try:
            task.check_files(split)
        except TaskError as error:
            yield RecipeIssue(path, error.problem, error.remedy)


def _path(index: int, measure: EvaluationTask, field: str) -> tuple[str | int, ...]:
    return ("evaluation", "tasks", index, measure.measure, field)
