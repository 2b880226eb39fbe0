"""Readers of texts and pairs of texts with labels or scores, and of sentences cut into words with a tag each (columns
as in CoNLL-2003, or lists in jsonl and Parquet), from the files of a split."""

from collections.abc import Iterator, Sequence

import numpy as np

from launcher.after.tasks.examples import Sentences, Tagged
from launcher.after.tasks.files import FilePosition, TaskFolder, read_lines
from launcher.after.tasks.rows import FileRow, label_index, layout_of, read_rows, score_value, valid_text
from launcher.after.tasks.schema import SCORED, Description, File, Judged, OneClass, Scheme, WithGold
from launcher.errors import TaskError

_Labelled = tuple[FileRow, str]  # a row, and its label as the files spell it


def read_sentences(task: Description, files: Sequence[File], folder: TaskFolder) -> Sentences:
    """Return the examples of `files` in their order, without those whose label is one of `skip_labels`.

    Raises:
        TaskError: if a file is missing, a row cannot be used, or a label is not one of the task's.
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
    """Yield the rows of a file of texts with the lines of the same number in the file of labels. A label may be blank
    (STS: a pair without a score)."""
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
            remedy="fetch both files again: each line of the one belongs to the same line of the other",
        )


_DOCUMENT = "-DOCSTART-"  # beginning of a line between two documents


def read_tagged(task: Description, files: Sequence[File], folder: TaskFolder) -> Tagged:
    """Return the sentences of `files` in their order, tags converted to BIO.

    Raises:
        TaskError: if a file is missing, a sentence has more or fewer tags than words, or a tag is not one of the
            task's.
    """
    words: list[tuple[str, ...]] = []
    tags: list[tuple[int, ...]] = []
    for file in files:
        assert isinstance(file, str), "refused with the task"
        for place, sentence, given in _sentences(task, file, folder):
            found = to_bio(given, task.scheme)
            words.append(tuple(sentence))
            tags.append(tuple(label_index(tag, place, task) for tag in found))
    return Tagged(tuple(words), tuple(tags))


def _sentences(
    task: Description, path: str, folder: TaskFolder
) -> Iterator[tuple[FilePosition, list[str], list[str]]]:
    """Yield, for each sentence, its position in the file (for columns, of its last line), its words, and its tags as
    they are in the file."""
    file = folder.find(path)
    if task.format == "columns":
        yield from _columns(task, FilePosition(file, "line", 0))
        return
    for row in read_rows(layout_of(task), file):
        words, tags = (_list(row, str(place)) for place in (task.fields.words, task.fields.tags))
        if len(words) != len(tags):
            raise TaskError(
                f"{row.place}: {len(words)} words, but {len(tags)} tags",
                remedy="correct or remove the record",
            )
        if words:
            yield row.place, [valid_text(word, row.place) for word in words], tags


def _list(row: FileRow, name: str) -> list[str]:
    value = row.value(name)
    if isinstance(value, list) and all(isinstance(part, str | int) for part in value):
        return [str(part) for part in value]
    raise TaskError(
        f"{row.place}: the field {name!r} is not a list of words or tags",
        remedy="correct the file, or the task's `fields`",
    )


def _columns(task: Description, start: FilePosition) -> Iterator[tuple[FilePosition, list[str], list[str]]]:
    """Yield the sentences of a file with a word on each line and a blank line after each sentence. Columns are
    separated by tabs or, in a line without tabs, by spaces."""
    word_column, tag_column = task.fields.words, task.fields.tags
    assert isinstance(word_column, int)
    assert isinstance(tag_column, int)
    words: list[str] = []
    tags: list[str] = []
    place, width = start, 0
    for number, line in enumerate(read_lines(start.file, task.encoding), 1):
        if not line.strip() or line.startswith(_DOCUMENT):
            if words:
                yield place, words, tags
            words, tags = [], []
            continue
        place = FilePosition(start.file, "line", number)
        cells = line.split("\t" if "\t" in line else " ")
        width = width or len(cells)
        if len(cells) != width or width < max(word_column, tag_column):
            raise TaskError(
                f"{place}: {len(cells)} columns, but {max(width, word_column, tag_column)} are needed: "
                "words and tags are of different number",
                remedy="correct the line, or the task's `fields`",
            )
        words.append(cells[word_column - 1])
        tags.append(cells[tag_column - 1])
    if words:
        yield place, words, tags


def to_bio(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Return the tags of a sentence in BIO (IOB2), where every entity begins with B-.

    iob1 (CoNLL-2003 as published): B- only begins an entity that directly follows another of its type.
    bioes: E- ends an entity, S- is an entity of a single word.
    """
    match scheme:
        case "bio":
            return list(tags)
        case "bioes":
            ends = {"E-": "I-", "S-": "B-"}
            return [ends.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]
        case "iob1":
            before = ["O", *tags]
            begins = (
                tag.startswith("I-") and previous[2:] != tag[2:]
                for previous, tag in zip(before, tags, strict=False)
            )
            return ["B-" + tag[2:] if begin else tag for begin, tag in zip(begins, tags, strict=True)]
