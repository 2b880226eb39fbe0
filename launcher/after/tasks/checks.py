"""Finds parts of a task's description that contradict each other. Each problem is named by its place in the YAML."""

from collections.abc import Iterator

from launcher.after.tasks.schema import (
    FORMATS,
    LABELLED,
    METRICS,
    PAIRS,
    SCORED,
    TABLES,
    Description,
    File,
    Judged,
    OneClass,
    WithGold,
)
from launcher.runtime.recipe.parts import RecipeIssue


def impossible(task: Description) -> list[RecipeIssue]:
    """All that is wrong with a task whose single values are valid."""
    return [*_kind(task), *_labels(task), *_splits(task), *_fields(task), *_files(task)]


def _kind(task: Description) -> Iterator[RecipeIssue]:
    if task.format not in FORMATS[task.kind]:
        known = ", ".join(FORMATS[task.kind])
        yield RecipeIssue(("format",), f"{task.format} does not hold {task.kind}", f"use one of {known}")
    for index, metric in enumerate(task.metrics):
        if metric not in METRICS[task.kind]:
            known = ", ".join(METRICS[task.kind])
            yield RecipeIssue(
                ("metrics", index), f"{metric} is no metric of {task.kind}", f"use some of {known}"
            )
        elif metric in task.metrics[:index]:
            yield RecipeIssue(("metrics", index), f"{metric} is given twice", "keep one")
        elif metric == "f1" and len(task.labels) != 2:
            what = f"f1 is of two labels, the second being the positive one, not of {len(task.labels)}"
            yield RecipeIssue(("metrics", index), what, "use macro_f1")
    if task.after == task.name:
        yield RecipeIssue(
            ("after",), "a task cannot start from itself", "name another task, or leave after out"
        )
    if task.no_answer and task.kind != "span":
        yield RecipeIssue(("no_answer",), f"{task.kind} has no answers", "leave no_answer out")


def _labels(task: Description) -> Iterator[RecipeIssue]:
    if task.kind in LABELLED and len(task.labels) < 2:
        yield RecipeIssue(("labels",), f"{task.kind} needs at least two labels", "list them in `labels`")
    if task.kind not in LABELLED and task.labels:
        yield RecipeIssue(("labels",), f"{task.kind} has no labels", "leave labels out")
    for index, label in enumerate(task.labels):
        if label in task.labels[:index]:
            yield RecipeIssue(("labels", index), f"the label {label!r} is given twice", "keep one")
        if label in task.skip_labels:
            what = f"the label {label!r} is in skip_labels, too"
            yield RecipeIssue(("labels", index), what, "leave it out of one of the two")
    if task.score_range is None:
        return
    if task.kind not in SCORED:
        yield RecipeIssue(("score_range",), f"{task.kind} has no scores", "leave score_range out")
    elif not task.score_range[0] < task.score_range[1]:
        yield RecipeIssue(
            ("score_range",), "the first is not less than the second", "give the least, the greatest"
        )


def _splits(task: Description) -> Iterator[RecipeIssue]:
    made = [name for name, share in task.held_out if share]
    if made and "train" not in task.files:
        yield RecipeIssue(
            ("held_out",), "it takes from the split train, which files lacks", "name train in files"
        )
    if made and task.kind == "retrieval":
        yield RecipeIssue(("held_out",), "retrieval cannot be divided", "leave held_out out")
    for name in made:
        if name in task.files:
            what = f"the split {name} is in files, too"
            yield RecipeIssue(("held_out", name), what, "leave it out of one of the two")
    if task.held_out.dev + task.held_out.test >= 1:
        yield RecipeIssue(("held_out",), "nothing is left of train", "hold out smaller shares")
    for index, name in enumerate(task.unlabelled):
        if name not in task.files:
            what = f"{name} is no split of files"
            yield RecipeIssue(("unlabelled", index), what, f"files has {', '.join(task.files)}")
    if not task.splits:
        yield RecipeIssue(("unlabelled",), "no split is left that has labels", "a task needs one")


def _fields(task: Description) -> Iterator[RecipeIssue]:
    given = task.fields.named()
    if task.format not in TABLES:
        if given:
            yield RecipeIssue(("fields",), f"format {task.format} has fields of its own", "leave fields out")
        return
    for name in _needed(task):
        if name not in given:
            what = f"no field {name!r}, which {task.kind} needs"
            yield RecipeIssue(
                ("fields",), what, "give its name, or in a table without names its column's number"
            )
    numbers = [name for name, place in given.items() if isinstance(place, int)]
    may_have_numbers = task.format in ("tsv", "csv", "columns")
    if numbers and (len(numbers) < len(given) or not may_have_numbers):
        what = "some are numbers" if may_have_numbers else f"numbers do not name fields of {task.format}"
        yield RecipeIssue(
            ("fields",), what, "give names throughout, or in tsv, csv and columns numbers throughout"
        )
    if task.format == "columns" and len(numbers) < len(given):
        yield RecipeIssue(("fields",), "the fields of columns are numbers", "number the columns from 1")
    for name in numbers:
        if int(given[name]) < 1:
            yield RecipeIssue(
                ("fields", name), f"there is no column {given[name]}", "number the columns from 1"
            )


def _needed(task: Description) -> tuple[str, ...]:
    """Fields that every row must have."""
    match task.kind:
        case "tagging":
            return ("words", "tags")
        case "span":
            return ("id", "question", "context", "answers")
        case "retrieval":
            return ()
        case _:
            files = [file for split in task.files for file in task.sources(split)]
            apart = any(isinstance(file, OneClass | WithGold) for file in files)
            return ("first", *(("second",) if task.kind in PAIRS else ()), *(() if apart else ("label",)))


def _files(task: Description) -> Iterator[RecipeIssue]:
    for split, given in task.files.items():
        for index, file in enumerate(task.sources(split)):
            path = ("files", split, index) if isinstance(given, list) else ("files", split)
            if reason := _unfit(task, file):
                yield RecipeIssue(path, *reason)
        if not task.sources(split):
            yield RecipeIssue(("files", split), "no file", "name one, or leave the split out")


def _unfit(task: Description, file: File) -> tuple[str, str] | None:
    """RecipeIssue and remedy of one file."""
    if isinstance(file, Judged) != (task.kind == "retrieval"):
        remedy = "retrieval has {corpus, queries, qrels}, other kinds have paths"
        return f"not a file of {task.kind}", remedy
    if isinstance(file, OneClass):
        if task.kind not in ("classification", "pair_classification"):
            return f"{task.kind} has no files of one label", "give a path"
        if file.label not in task.labels:
            return f"the label {file.label!r} is not one of labels", "use one of labels, or add it there"
    if isinstance(file, WithGold):
        named = any(isinstance(place, str) for place in task.fields.named().values())
        if named or task.format not in ("tsv", "txt"):
            return "gold goes with lines", "use format txt, or tsv with columns by number"
    return None
