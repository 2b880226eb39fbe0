"""Reads rows of texts with labels, for training and measuring, from tasks or from tables with any columns."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.after.embed.settings import RowSource
from launcher.after.tasks.examples import Examples, Sentences
from launcher.after.tasks.files import FileRow, RowFormat, TaskFolder, format_from_suffix, read_rows
from launcher.after.tasks.read import label_index, parse_score
from launcher.after.tasks.task import Task, load_task
from launcher.errors import TaskError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextColumns:
    """Columns of texts, in the order that the loss takes them, and a label for each row.

    Attributes:
        texts: columns of equal length.
        labels: indices into `classes`, or scores from 0 to 1; None without labels.
        classes: names of the classes; empty if labels are scores.
    """

    texts: dict[str, list[str]]
    labels: list[int] | list[float] | None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))


def read_text_columns(source: RowSource, root: str | None) -> TextColumns:
    """Return all selected rows of a source. `root`: folder or s3:// URI of the files; None: the current folder.

    Raises:
        TaskError: if a file or a column is missing, a file cannot be read, a text is blank, a label is not one of the
            classes, a score is not a number or out of range, or there is no row.
        InputError, StoreError: if data are damaged, or a store does not answer.
    """
    if not source.tasks:
        return _read_table_files(source, root or ".")
    tasks = [load_task(name, root) for name in source.tasks]
    return join_task_pairs([(task, task.read(source.split)) for task in tasks])


def join_task_pairs(task_examples: Sequence[tuple[Task, Examples]]) -> TextColumns:
    """Return the pairs of one or several tasks. Raises TaskError if a task has no pairs, or if its labels are not those
    of the first task."""
    first: list[str] = []
    second: list[str] = []
    labels: list[Any] = []
    before = task_examples[0][0]
    classes = tuple(before.labels)
    for task, examples in task_examples:
        if not isinstance(examples, Sentences) or examples.second is None:
            raise TaskError(
                f"the task {task.name} is of the kind {task.kind}, which has no pairs of texts",
                remedy="name tasks of the kinds pair_classification, similarity or regression",
            )
        if sorted(task.labels) != sorted(classes):
            raise TaskError(
                f"the labels of {task.name} are {', '.join(task.labels) or 'scores'}, those of {before.name} "
                f"{', '.join(classes) or 'scores'}",
                remedy="name only tasks with the same labels",
            )
        first += examples.first
        second += examples.second
        labels += _training_labels(task, examples, classes)
    return TextColumns({"first": first, "second": second}, labels, classes)


def _training_labels(task: Task, examples: Sentences, classes: tuple[str, ...]) -> list[int] | list[float]:
    """Return the labels as indices into `classes`; without classes, the scores, scaled to lie between 0 and 1."""
    if classes:
        return [classes.index(task.labels[int(label)]) for label in examples.labels]
    scores = np.asarray(examples.labels, dtype=np.float64)
    low, high = task.score_range or (float(scores.min()), float(scores.max()))
    return [float(score) for score in (scores - low) / max(high - low, 1e-12)]


def _read_table_files(source: RowSource, root: str) -> TextColumns:
    texts: dict[str, list[str]] = {str(column): [] for column in source.texts}
    labels: list[Any] = []
    ignored = 0
    try:
        for row in _selected_rows(source, root):
            if source.label is not None and row.label(str(source.label)) in source.ignore:
                ignored += 1
                continue
            for column, found in texts.items():
                found.append(_nonblank_text(row, column))
            if source.label is not None:
                labels.append(_parse_label(row, row.label(str(source.label)), source))
    except TaskError as error:  # its remedy names keys of a task's YAML, and not those of the settings
        raise TaskError(
            error.problem,
            remedy="correct the file, or these settings: the columns in `texts`, `label` and `where`; `encoding`, "
            "`classes`, `ignore`, `scores`",
        ) from error
    if ignored:
        _LOG.warning("%s: %s rows are left out, whose label is in `ignore`", ", ".join(source.files), f"{ignored:,}")
    if not next(iter(texts.values())):
        raise TaskError(
            f"{', '.join(source.files)}: no row is selected",
            remedy="give files with rows, and check `where` and `ignore`",
        )
    return TextColumns(texts, labels if source.label is not None else None, source.classes or ())


def _selected_rows(source: RowSource, root: str) -> Iterator[FileRow]:
    """Yield the rows of all files that are selected by `where`."""
    folder = TaskFolder(root, "embed train", source.published or "wherever you have your data")
    for path in source.files:
        form = format_from_suffix(path)
        layout = RowFormat(form, source.columns, encoding=source.encoding, quoted=form == "csv")
        for row in read_rows(layout, folder.find_file(path)):
            if all(str(row.value(column)) == value for column, value in source.where.items()):
                yield row


def _nonblank_text(row: FileRow, column: str) -> str:
    text = row.text(column)
    if not text.strip():
        raise row.error(f"the field {column!r} is {text!r}, which is blank")
    return text


def _parse_label(row: FileRow, label: str, source: RowSource) -> int | float:
    if source.classes is not None:
        return label_index(label, row.place, source.classes)
    low, high = source.scores
    return (parse_score(label, row.place, source.scores) - low) / (high - low)
