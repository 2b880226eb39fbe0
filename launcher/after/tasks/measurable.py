"""Loads the tasks that the frozen measures of a recipe name, and checks that their kind can be measured and their files
exist.

`maskfleet init` and `train` call this before training.
"""

from collections.abc import Iterator, Sequence

from data_service.errors import UserError
from data_service.store.errors import StoreError
from launcher.after.tasks.schema import SCORED, TEXTS
from launcher.after.tasks.task import Task, load_task
from launcher.errors import EVALUATE, RecipeError, RunError, TaskError, optional
from launcher.runtime.recipe.evaluation import (
    AnisotropySettings,
    EvaluationTask,
    ProbeSettings,
    SimilaritySettings,
)
from launcher.runtime.recipe.parts import RecipeIssue


def probed(settings: ProbeSettings) -> Task:
    """Return the task of a linear probe. Raises TaskError if there is no such task, RunError if it is not
    classification."""
    task = load_task(settings.task, settings.data)
    if task.kind not in ("classification", "pair_classification"):
        raise RunError(
            f"{task.name} is a task of {task.kind}, which no linear probe measures",
            remedy="name a classification task",
        )
    return task


def compared(settings: SimilaritySettings) -> Task:
    """Return the task whose scores are compared with cosines. Raises TaskError if there is no such task, RunError if it
    has no scores."""
    task = load_task(settings.task, settings.data)
    if task.kind not in SCORED:
        raise RunError(
            f"{task.name} has no pairs of texts with a score each", remedy="name a task of kind similarity"
        )
    return task


def with_texts(settings: AnisotropySettings) -> Task:
    """Return the task on whose texts anisotropy is measured. Raises TaskError if there is no such task, RunError if it
    has no texts."""
    assert settings.task is not None
    task = load_task(settings.task, settings.data)
    if task.kind not in TEXTS:
        raise RunError(
            f"{task.name} is a task of {task.kind}, which has no texts to measure anisotropy on",
            remedy="name a task of classification or similarity",
        )
    return task


def measured_split(task: Task) -> str:
    """Return the split on which figures are measured: test if it is labelled, else dev."""
    return "test" if "test" in task.splits else "dev"


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
        _task(measure)
    except StoreError:
        raise
    except UserError as error:
        yield RecipeIssue(_path(index, measure, "task"), error.problem, error.remedy)


def _file_problems(index: int, measure: EvaluationTask) -> Iterator[RecipeIssue]:
    task = _task(measure)
    if task is None:
        return
    path = _path(index, measure, "data")
    if task.root is None:
        what = f"the folder with the files of {task.name} is not given"
        remedy = f"set data to the folder or s3:// URI of the files, which are published at {task.published}"
        yield RecipeIssue(path, what, remedy)
        return
    for split in _splits(measure, task):
        try:
            task.check_files(split)
        except TaskError as error:
            yield RecipeIssue(path, error.problem, error.remedy)


def _splits(measure: EvaluationTask, task: Task) -> tuple[str, ...]:
    """Return the splits that the measure reads."""
    if measure.probe:
        return ("train", "dev", *(("test",) if "test" in task.splits else ()))
    if measure.anisotropy and "dev" in task.splits:
        return ("dev",)
    return (measured_split(task),)


def _task(measure: EvaluationTask) -> Task | None:
    if measure.probe:
        return probed(measure.probe)
    if measure.similarity:
        return compared(measure.similarity)
    return with_texts(measure.anisotropy) if measure.anisotropy and measure.anisotropy.task else None


def _path(index: int, measure: EvaluationTask, field: str) -> tuple[str | int, ...]:
    return ("evaluation", "tasks", index, measure.measure, field)
