"""Texts and pairs of texts with labels or scores, from the files of a split."""

from collections.abc import Iterator, Sequence

import numpy as np

from launcher.after.tasks.examples import Sentences
from launcher.after.tasks.files import TaskFolder, read_lines
from launcher.after.tasks.rows import FileRow, label_index, layout_of, read_rows, score_value
from launcher.after.tasks.schema import SCORED, Description, File, Judged, OneClass, WithGold
from launcher.errors import TaskError

_Labelled = tuple[FileRow, str]  # and the label as the files spell it


def read_sentences(task: Description, files: Sequence[File], folder: TaskFolder) -> Sentences:
    """The examples of `files` in their order, without those whose label is one of `skip_labels`.

    Raises:
        TaskError: a file that is missing, a row that cannot be used, a label that is not one of the task's.
    """
    built_in = {"first": "first", "label": "label"}
    names = {**built_in, **{role: str(place) for role, place in task.fields.named().items()}}
    first: list[str] = []
    second: list[str] = []
    labels: list[float] = []
    for file in files:
        for row, label in _labelled(task, file, folder, names["label"]):
            if label in task.skip_labels:
                continue
            value = score_value if task.kind in SCORED else label_index
            labels.append(value(label, row.place, task))
            first.append(row.text(names["first"]))
            if "second" in names:
                second.append(row.text(names["second"]))
    values = np.array(labels, np.float64)
    return Sentences(
        tuple(first),
        tuple(second) if "second" in names else None,
        values if task.kind in SCORED else values.astype(np.int64),
    )


def _labelled(task: Description, file: File, folder: TaskFolder, label: str) -> Iterator[_Labelled]:
    match file:
        case OneClass():
            of_all = str(task.labels.index(file.label)) if task.label_ids else file.label
            yield from ((row, of_all) for row in read_rows(layout_of(task), folder.find(file.path)))
        case WithGold():
            yield from _with_gold(task, file, folder)
        case Judged():
            raise AssertionError("refused with the task")
        case _:
            yield from ((row, row.label(label)) for row in read_rows(layout_of(task), folder.find(file)))


def _with_gold(task: Description, file: WithGold, folder: TaskFolder) -> Iterator[_Labelled]:
    """Line n of the one belongs to line n of the other, which may be blank (STS: a pair that was not scored)."""
    texts, golds = folder.find(file.path), folder.find(file.gold)
    gold = [line.strip() for line in read_lines(golds, task.encoding)]
    last = 0
    for row in read_rows(layout_of(task), texts):
        last = row.place.number
        if last <= len(gold):
            yield row, gold[last - 1]
    if last != len(gold):
        raise TaskError(
            f"{texts.uri} has {last:,} lines, {golds.uri} has {len(gold):,}",
            remedy="the two belong together line by line: fetch them again",
        )
