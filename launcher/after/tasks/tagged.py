"""Sentences cut into words, each with a tag: columns as in CoNLL-2003, or lists in jsonl and Parquet."""

from collections.abc import Iterator, Sequence

from launcher.after.tasks.examples import Tagged
from launcher.after.tasks.files import FilePosition, TaskFolder, read_lines
from launcher.after.tasks.rows import FileRow, label_index, layout_of, read_rows, valid_text
from launcher.after.tasks.schema import Description, File, Scheme
from launcher.errors import TaskError

_DOCUMENT = "-DOCSTART-"  # the word of a line between two documents


def read_tagged(task: Description, files: Sequence[File], folder: TaskFolder) -> Tagged:
    """The sentences of `files` in their order, tags converted to BIO.

    Raises:
        TaskError: a file that is missing, words and tags of different number, a tag that is not one of the task's.
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
    """Where each sentence ends, its words and its tags as written."""
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
        f"{row.place}: the field {name!r} is no list of words or tags",
        remedy="correct the file, or the task's `fields`",
    )


def _columns(task: Description, start: FilePosition) -> Iterator[tuple[FilePosition, list[str], list[str]]]:
    """A word a line, a blank line after each sentence. Columns are parted by tabs or, where a line has none, spaces."""
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
                f"{place}: {len(cells)} columns, where {max(width, word_column, tag_column)} are needed: "
                "words and tags are of different number",
                remedy="correct the line, or the task's `fields`",
            )
        words.append(cells[word_column - 1])
        tags.append(cells[tag_column - 1])
    if words:
        yield place, words, tags


def to_bio(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Tags of one sentence in BIO (IOB2): every entity begins with B-.

    iob1 (CoNLL-2003 as published): B- only where an entity follows another of its type at once.
    bioes: E- ends an entity, S- is one of a single word.
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
