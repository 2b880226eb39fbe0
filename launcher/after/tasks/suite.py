"""A suite: tasks that are measured together, by name or YAML file, optionally with settings of their own.

name: small
tasks:
  - sst2
  - {task: rte, finetune: {epochs: 5}}
  - mine/news.yaml
"""

from collections.abc import Mapping

from pydantic import Field

from data_service.store.open import parent_folder
from launcher.after.tasks.schema import SettingValue, TaskName, TaskYamlModel
from launcher.after.tasks.task import Task, bundled_tasks, bundled_yaml_texts, load_task, read_yaml, unknown_name_error
from launcher.errors import TaskError
from launcher.runtime.recipe.document import DocumentWording, parse_document, validate

DOCUMENT_WORDING = DocumentWording("suite", "maskfleet tasks show glue", TaskError)  # how messages name a suite


class SuiteEntry(TaskYamlModel):
    """A task of a suite.

    Attributes:
        task: name of a bundled task, or path of a YAML file relative to the suite's file.
        data: folder or s3:// URI with the task's files; None: that of the suite.
        finetune: settings that replace the task's settings of the same names.
    """

    task: str
    data: str | None = None
    finetune: dict[str, SettingValue | list[SettingValue]] = Field(default_factory=dict)


class Suite(TaskYamlModel):
    """A suite as its YAML describes it.

    Attributes:
        tasks: tasks for which models are fine-tuned, or on which their vectors are measured.
    """

    name: TaskName
    about: str = ""
    tasks: tuple[str | SuiteEntry, ...] = Field(min_length=1)

    @property
    def suite_entries(self) -> list[SuiteEntry]:
        """All tasks as entries, also those that the YAML gives by name only."""
        return [SuiteEntry(task=entry) if isinstance(entry, str) else entry for entry in self.tasks]


def load_suite(name_or_path: str, data: str | None = None) -> tuple[Task, ...]:
    """Return the tasks of a bundled suite or of a suite's YAML file. The suite's settings replace the tasks' settings.

    The name or the file of a single task counts as a suite of one task. `data`: as in `load_task`, for every task
    without `data` in the suite. If it is None, the files of bundled tasks are in the folder of the suite's file, and
    the files of a task with a YAML file are in the folder of that file.

    Raises:
        TaskError: if there is no such suite or task, a file has a mistake (the message names the line), or a task is in
            the suite twice.
    """
    suite = read_suite(name_or_path)
    if suite is None:
        return (load_task(name_or_path, data),)
    home = None if name_or_path in bundled_suites() else parent_folder(name_or_path)
    tasks: dict[str, Task] = {}
    for entry in suite.suite_entries:
        task = _load_entry(entry, home, data)
        if task.name in tasks:
            raise TaskError(
                f"the suite {suite.name} has two tasks called {task.name}",
                remedy="rename one of the two",
            )
        tasks[task.name] = task
    return tuple(tasks.values())


def _resolve_task(task: str, suite_folder: str | None, data_folder: str | None) -> tuple[str, str | None]:
    """Return the name or path of a task that a suite names, and the folder of the task's files. `suite_folder`: folder
    of the suite's file; None for a bundled suite. `data_folder`: folder of the task's files, if the user gives one."""
    if not task.endswith((".yaml", ".yml")):
        return task, suite_folder if data_folder is None else data_folder
    beside = suite_folder is not None and not task.startswith("/") and "://" not in task
    return f"{suite_folder}/{task}" if beside else task, data_folder


def read_suite(name_or_path: str) -> Suite | None:
    """Return the suite of that name or in that file; None if the name or file is a task's.

    Raises TaskError if there is no such suite or task, or the file has a mistake.
    """
    suites = bundled_suites()
    if name_or_path in suites:
        return validate(Suite, parse_document(suites[name_or_path], name_or_path, DOCUMENT_WORDING))
    tasks = bundled_tasks()
    if name_or_path in tasks:
        return None
    if not name_or_path.endswith((".yaml", ".yml")):
        raise unknown_name_error(name_or_path, suites=suites, tasks=tasks)
    document = parse_document(read_yaml(name_or_path), name_or_path, DOCUMENT_WORDING)
    return validate(Suite, document) if "tasks" in document.data else None


def bundled_suites() -> Mapping[str, str]:
    """Return the YAML texts of the bundled suites, by name."""
    return bundled_yaml_texts("launcher.after.tasks", "library/suites")


def _load_entry(entry: SuiteEntry, suite_folder: str | None, data: str | None) -> Task:
    """Return the task of an entry; arguments as for `_resolve_task`."""
    task = load_task(*_resolve_task(entry.task, suite_folder, data if entry.data is None else entry.data))
    return task.model_copy(update={"finetune": {**task.finetune, **entry.finetune}})
