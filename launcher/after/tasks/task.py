"""A task on which models are trained or measured: a small YAML that describes published files. Nothing is downloaded.

`load_task` reads a bundled task or a YAML file; `Task.read` returns the examples of a split, the same for every model.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from pydantic import PrivateAttr

from data_service.store.errors import KeyMissing
from data_service.store.open import open_store_of_file, parent_folder
from launcher.after.tasks.examples import Examples, examples_digest, select_hashed_split
from launcher.after.tasks.files import TaskFolder
from launcher.after.tasks.read import read_questions, read_retrieval, read_sentences, read_tagged_sentences
from launcher.after.tasks.schema import TaskDescription, task_issues
from launcher.errors import TaskError
from launcher.runtime.recipe.document import DocumentWording, parse_document, validate

DOCUMENT_WORDING = DocumentWording("task", "maskfleet tasks show sst2", TaskError)  # how messages name a task's YAML
# Settings on which results depend, so they are part of the task's digest.
_DIGESTED_SETTINGS = {
    "kind",
    "labels",
    "score_range",
    "no_answer",
    "metrics",
    "truncation",
}


class Task(TaskDescription):
    """A task: its description, and the folder with its files."""

    _root: str | None = PrivateAttr(default=None)

    @property
    def root(self) -> str | None:
        """Folder or s3:// URI to which the files' paths are relative; None if it was not given."""
        return self._root

    def read(self, split: str) -> Examples:
        """Return the examples of a split, `dev` for example, in the order of the files.

        Raises:
            TaskError: if there is no such split, a file is missing, a record cannot be used, or no example is left.
            InputError, StoreError: if a file cannot be read.
        """
        published, folder = self._published_split(split)
        examples = self._read_published(published, folder)
        if published == "train" and (self.held_out.dev or self.held_out.test):
            examples = select_hashed_split(examples, self.held_out, split)
        if not len(examples):
            raise TaskError(
                f"the split {split} of the task {self.name} is empty",
                remedy="check its files, and whether `skip_labels` or `held_out` leave no example",
            )
        return examples

    def check_files(self, split: str) -> None:
        """Check that the files of a split exist, without reading them.

        Raises:
            TaskError: if there is no such split, or a file is missing.
            StoreError: if the store does not answer.
        """
        published, folder = self._published_split(split)
        for path in self.split_paths(published):
            folder.find_file(path)

    def _published_split(self, split: str) -> tuple[str, TaskFolder]:
        """Return the published split that contains `split`, and the folder of its files."""
        if split not in self.splits:
            raise self._no_split_error(split)
        if self._root is None:
            raise TaskError(
                f"the folder with the files of the task {self.name} is not known",
                remedy=f"pass the folder with --data; the files are published at {self.published}",
            )
        return split if split in self.files else "train", TaskFolder(self._root, self.name, self.published)

    def _read_published(self, split: str, folder: TaskFolder) -> Examples:
        files = self.split_files(split)
        match self.kind:
            case "classification" | "pair_classification" | "regression" | "similarity":
                return read_sentences(self, files, folder)
            case "tagging":
                return read_tagged_sentences(self, files, folder)
            case "span":
                return read_questions(self, files, folder)
            case "retrieval":
                return read_retrieval(self, files, folder)

    def _no_split_error(self, split: str) -> TaskError:
        if split in self.unlabelled:
            return TaskError(
                f"the split {split} of the task {self.name} is published without labels",
                remedy=f"use one of {', '.join(self.splits)}",
            )
        return TaskError(f"the task {self.name} has no split {split!r}", remedy=f"use one of {', '.join(self.splits)}")


def load_task(name_or_path: str, data: str | None = None) -> Task:
    """Return the bundled task of that name, or the task in the YAML file at that path or s3:// URI.

    `data`: folder or s3:// URI with the published files. If it is None, paths in a YAML file are relative to that file,
    and a bundled task can be shown but its examples cannot be read.

    Raises:
        TaskError: if there is no such task, or the file has a mistake; the message names the line.
    """
    known = bundled_tasks()
    if name_or_path in known:
        return parse_task(known[name_or_path], name_or_path, data)
    if not name_or_path.endswith((".yaml", ".yml")):
        raise unknown_name_error(name_or_path, tasks=known)
    return parse_task(read_yaml(name_or_path), name_or_path, parent_folder(name_or_path) if data is None else data)


def unknown_name_error(name: str, **known: Collection[str]) -> TaskError:
    """Return the error for an unknown name. `known`: all names, by kind of the named things: `tasks`, `suites`."""
    close = difflib.get_close_matches(name, [one for names in known.values() for one in names], n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    listed = "; ".join(f"bundled {what}: {', '.join(names)}" for what, names in known.items())
    return TaskError(
        f"there is no {' or '.join(what.removesuffix('s') for what in known)} {name!r}",
        remedy=f"{guess}{listed}; or give the path of a .yaml file",
    )


def parse_task(text: str, name: str, root: str | None) -> Task:
    """Return the task in the YAML `text`, whose files are below `root`. `name`: name of the YAML in messages. Raises
    TaskError if the text has a mistake."""
    document = parse_document(text, name, DOCUMENT_WORDING)
    task = validate(Task, document)
    if problems := task_issues(task):
        raise TaskError(
            "\n".join(f"{document.location_text(problem.path)}: {problem.what}" for problem in problems),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )
    task._root = root
    return task


def bundled_tasks() -> Mapping[str, str]:
    """Return the YAML texts of the bundled tasks, by name."""
    return bundled_yaml_texts("launcher.after.tasks", "library")


@cache
def bundled_yaml_texts(package: str, folder: str) -> Mapping[str, str]:
    """Return the texts of the YAML files in a folder of a package, by name without ending, sorted by name."""
    files = (resources.files(package) / folder).iterdir()
    named = {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
    return MappingProxyType({name: named[name].read_text("utf-8") for name in sorted(named)})


def task_digest(task: Task) -> str:
    """Return the SHA-256 of everything in a task that results depend on: the settings that models or metrics see, and
    the examples of all splits with labels.

    Renaming the task or moving its files keeps the digest; other data or another metric changes it. The settings of
    fine-tuning (`finetune`) are left out, because results are keyed by them separately.

    Raises the errors of `Task.read`.
    """
    return hash_examples(task, {split: task.read(split) for split in task.splits})


def hash_examples(task: Task, examples: Mapping[str, Examples]) -> str:
    """Return the same digest as `task_digest`, from splits that have been read already."""
    settings = task.model_dump(mode="json", include=_DIGESTED_SETTINGS)
    content = {split: examples_digest(read) for split, read in examples.items()}
    data = json.dumps([settings, content], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(data.encode()).hexdigest()


def read_yaml(path: str) -> str:
    """Return the text of a YAML file, local or on S3. Raises TaskError if there is none, or it is not UTF-8."""
    try:
        store, name = open_store_of_file(path)
        return store.get(name).decode()
    except KeyMissing as error:
        raise TaskError(f"there is no file {path}", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text", remedy="give a YAML file") from error
