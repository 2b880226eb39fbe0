"""A suite: tasks that are measured together, by name or YAML file, each with settings of its own where it needs them.

name: small
tasks:
  - sst2
  - {task: rte, finetune: {epochs: 5}, after: null}
  - mine/news.yaml
frozen:
  - probe: {task: sst2}
  - similarity: {task: stsb}
  - anisotropy: {task: sst2}
"""

import difflib
from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from launcher.after.tasks.schema import Name, Setting, TaskPart
from launcher.after.tasks.task import Task, bundled_tasks, bundled_texts, home_of, load_task, read_yaml
from launcher.errors import TaskError
from launcher.runtime.recipe.document import Words, parse, validate
from launcher.runtime.recipe.evaluation import EvaluationTask

WORDS = Words("suite", "maskfleet tasks show glue", TaskError)


class SuiteEntry(TaskPart):
    """A task of a suite.

    Attributes:
        task: a bundled task's name, or a YAML file, relative to the suite's.
        data: folder or s3:// URI that holds its files, if it is not the suite's.
        finetune: settings in place of those that the task has by the same names.
        after: in place of the task's own, if given; null: start from the pretrained model.
    """

    task: str
    data: str | None = None
    finetune: dict[str, Setting | list[Setting]] = Field(default_factory=dict)
    after: Name | None = None


class Suite(TaskPart):
    """What a suite's YAML says.

    Attributes:
        tasks: what models are fine-tuned for, or their vectors measured on.
        frozen: what their hidden states are measured on, layer by layer.
    """

    name: Name
    about: str = ""
    tasks: tuple[str | SuiteEntry, ...] = ()
    frozen: tuple[EvaluationTask, ...] = ()

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.tasks and not self.frozen:
            raise ValueError("a suite needs tasks, or frozen measures")
        return self

    @property
    def entries(self) -> list[SuiteEntry]:
        """All tasks in the long form."""
        return [SuiteEntry(task=entry) if isinstance(entry, str) else entry for entry in self.tasks]


def load_suite(name_or_path: str, data: str | None = None) -> tuple[Task, ...]:
    """Return the tasks of a bundled suite or of a YAML file, with the suite's settings in place of theirs.

    A task's name or file is a suite of one. `data`: as `load_task`, for every task that has no `data` in the suite;
    without it, the files of bundled tasks are beside the suite's file, and those of a task's own file beside that.

    Raises:
        TaskError: there is no such suite or task, or a mistake in a file, with its line; a task that is there twice.
    """
    suite = read_suite(name_or_path)
    if suite is None:
        return (load_task(name_or_path, data),)
    home = None if name_or_path in bundled_suites() else home_of(name_or_path)
    tasks: dict[str, Task] = {}
    for entry in suite.entries:
        task = _task(entry, home, data)
        if task.name in tasks:
            raise TaskError(
                f"the suite {suite.name} has two tasks called {task.name}",
                remedy="give one of them another name",
            )
        tasks[task.name] = task
    return tuple(tasks.values())


def load_frozen(name_or_path: str, data: str | None = None) -> list[EvaluationTask]:
    """Return the frozen measures of a suite, with absolute places of their tasks' files; a task has none.

    `data` and errors: as `load_suite`; TaskError: the same measure of the same task twice.
    """
    suite = read_suite(name_or_path)
    home = None if name_or_path in bundled_suites() else home_of(name_or_path)
    found = [_placed(task, home, data) for task in suite.frozen] if suite else []
    names = [task.name for task in found]
    if again := [name for name in names if names.count(name) > 1]:
        raise TaskError(f"the suite {name_or_path} has {again[0]} twice", remedy="leave one of them out")
    return found


def _placed(measure: EvaluationTask, home: str | None, data: str | None) -> EvaluationTask:
    named = measure.named_task
    if named is None or named.task is None:
        return measure
    root, task = data if named.data is None else named.data, named.task
    if not task.endswith((".yaml", ".yml")):
        root = home if root is None else root
    elif home is not None and not task.startswith("/") and "://" not in task:
        task = f"{home}/{task}"
    placed = named.model_copy(update={"task": task, "data": root})
    return measure.model_copy(update={measure.measure: placed})


def read_suite(name_or_path: str) -> Suite | None:
    """Return the suite of that name or in that file; None where it is a task.

    Raises TaskError: there is neither, or a mistake in the file.
    """
    suites = bundled_suites()
    if name_or_path in suites:
        return validate(Suite, parse(suites[name_or_path], name_or_path, WORDS))
    tasks = bundled_tasks()
    if name_or_path in tasks:
        return None
    if not name_or_path.endswith((".yaml", ".yml")):
        close = difflib.get_close_matches(name_or_path, [*suites, *tasks], n=1, cutoff=0.5)
        guess = f"did you mean {close[0]}? " if close else ""
        raise TaskError(
            f"there is no suite or task {name_or_path!r}",
            remedy=f"{guess}suites: {', '.join(suites)}; tasks: {', '.join(tasks)}; or give the path of a .yaml file",
        )
    document = parse(read_yaml(name_or_path), name_or_path, WORDS)
    return validate(Suite, document) if {"tasks", "frozen"} & document.data.keys() else None


def bundled_suites() -> Mapping[str, str]:
    """YAML texts of the suites that come with Maskfleet, by name."""
    return bundled_texts("library/suites")


def _task(entry: SuiteEntry, home: str | None, data: str | None) -> Task:
    """`home`: the folder of the suite's file; None where it is a bundled one."""
    root = data if entry.data is None else entry.data
    if not entry.task.endswith((".yaml", ".yml")):
        task = load_task(entry.task, home if root is None else root)
    elif home is None or entry.task.startswith("/") or "://" in entry.task:
        task = load_task(entry.task, root)
    else:
        task = load_task(f"{home}/{entry.task}", root)
    changes: dict[str, object] = {"finetune": {**task.finetune, **entry.finetune}}
    if "after" in entry.model_fields_set:
        changes["after"] = entry.after
    return task.model_copy(update=changes)
