"""Reads a split's examples: texts and pairs with labels or scores; sentences cut into words with a tag each (columns as
in CoNLL-2003, or lists); questions about contexts (SQuAD's JSON, also CMRC 2018, or rows); and retrieval as BEIR, MTEB
and NanoBEIR publish it, with the fields `_id`, `title`, `text`; `query-id`, `corpus-id`, `score`."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_service.ingest.files import open_text
from data_service.ingest.inputs import InputFile
from launcher.after.tasks.examples import Answer, Questions, Retrieval, Sentences, TaggedSentences
from launcher.after.tasks.files import (
    FilePlace,
    FileRow,
    RowFormat,
    TaskFolder,
    check_valid_unicode,
    format_from_suffix,
    parse_json_object,
    read_lines,
    read_rows,
)
from launcher.after.tasks.schema import (
    SCORED_KINDS,
    RetrievalFiles,
    SingleLabelFile,
    TagScheme,
    TaskDescription,
    TaskFile,
    TextAndLabelFiles,
)
from launcher.errors import TaskError

_DOCUMENT_SEPARATOR = "-DOCSTART-"  # CoNLL's line between two documents begins with this
_QUERY_FIELD, _DOCUMENT_FIELD, _SCORE_FIELD = "query-id", "corpus-id", "score"  # in the file of judgements (qrels)
_LOG = logging.getLogger("launcher.after.tasks")


def read_sentences(task: TaskDescription, files: Sequence[TaskFile], folder: TaskFolder) -> Sentences:
    """Return the examples of `files` in their order, without those whose label is one of `skip_labels`. Raises
    TaskError if a file is missing, a row cannot be used, or a label is not one of the task's."""
    names = {"first": "first", "label": "label"} | {role: str(at) for role, at in task.fields.given_fields().items()}
    first, second, labels = list[str](), list[str](), list[float]()
    for file in files:
        for row, label in _labelled_rows(task, file, folder, names["label"]):
            if label in task.skip_labels:
                continue
            labels.append(
                parse_score(label, row.place, task.score_range)
                if task.kind in SCORED_KINDS
                else label_index(label, row.place, task.labels, by_index=task.label_ids)
            )
            first.append(row.text(names["first"]))
            if "second" in names:
                second.append(row.text(names["second"]))
    values = np.array(labels, np.float64)
    return Sentences(
        tuple(first),
        tuple(second) if "second" in names else None,
        values if task.kind in SCORED_KINDS else values.astype(np.int64),
    )


def _labelled_rows(
    task: TaskDescription, file: TaskFile, folder: TaskFolder, label_field: str
) -> Iterator[tuple[FileRow, str]]:
    """Yield the rows of a file, each with its label as the file spells it."""
    layout = RowFormat.from_task(task)
    if isinstance(file, SingleLabelFile):
        shared = str(task.labels.index(file.label)) if task.label_ids else file.label
        yield from ((row, shared) for row in read_rows(layout, folder.find_file(file.path)))
    elif isinstance(file, TextAndLabelFiles):
        yield from _read_with_label_file(task, file, folder)
    else:
        yield from ((row, row.label(label_field)) for row in read_rows(layout, folder.find_file(str(file))))


def _read_with_label_file(
    task: TaskDescription, file: TextAndLabelFiles, folder: TaskFolder
) -> Iterator[tuple[FileRow, str]]:
    """Yield each row of a file of texts, with the line of the same number in the file of labels. A label may be blank
    (STS: a pair without a score)."""
    texts, golds = folder.find_file(file.path), folder.find_file(file.gold)
    gold = [line.strip() for line in read_lines(golds, task.encoding)]
    last = 0
    for row in read_rows(RowFormat.from_task(task), texts):
        last = row.place.number
        if last <= len(gold):
            yield row, gold[last - 1]
    if last != len(gold):
        raise TaskError(
            f"{texts.uri} has {last:,} lines, {golds.uri} has {len(gold):,}",
            remedy="fetch both files again: line N of the labels must belong to line N of the texts",
        )


def label_index(label: str, place: FilePlace, labels: Sequence[str], *, by_index: bool = False) -> int:
    """Return the index of a label. `by_index`: whether `label` is an index into `labels` rather than a name. Raises
    TaskError if `labels` has no such name or index."""
    if by_index and label.isdecimal() and int(label) < len(labels):
        return int(label)
    if not by_index and label in labels:
        return labels.index(label)
    listed = ", ".join(labels[:12]) + (" ..." if len(labels) > 12 else "")
    known = f"an index below {len(labels)}" if by_index else f"one of {listed}"
    raise TaskError(
        f"{place}: the label {label!r} is not {known}",
        remedy="correct the file or the task's `labels`; list values that mean no label in `skip_labels`",
    )


def parse_score(text: str, place: FilePlace, bounds: tuple[float, float] | None) -> float:
    """Return the score in `text`. Raises TaskError if it is not a number within `bounds` (None: any finite number)."""
    score = math.nan
    with suppress(ValueError):
        score = float(text)
    low, high = bounds or (-math.inf, math.inf)
    if not math.isfinite(score) or not low <= score <= high:
        raise TaskError(
            f"{place}: the score {text!r} is not a finite number from {low:g} to {high:g}",
            remedy="correct the file or the task's `score_range`; list values that mean no score in `skip_labels`",
        )
    return score


def read_tagged_sentences(task: TaskDescription, files: Sequence[TaskFile], folder: TaskFolder) -> TaggedSentences:
    """Return the sentences of `files` in their order, tags converted to BIO. Raises TaskError if a file is missing, a
    sentence has more or fewer tags than words, or a tag is not one of the task's."""
    words, tags = list[tuple[str, ...]](), list[tuple[int, ...]]()
    for path in files:
        file = folder.find_file(str(path))
        for place, sentence, given in (
            _read_column_file(task, file) if task.format == "columns" else _read_list_rows(task, file)
        ):
            if len(sentence) != len(given):
                raise TaskError(
                    f"{place}: {len(sentence)} words, but {len(given)} tags",
                    remedy="correct or remove the record",
                )
            words.append(tuple(check_valid_unicode(word, place) for word in sentence))
            bio = to_bio(given, task.scheme)
            tags.append(tuple(label_index(tag, place, task.labels, by_index=task.label_ids) for tag in bio))
    return TaggedSentences(tuple(words), tuple(tags))


TaggedSentence = tuple[FilePlace, list[str], list[str]]
"""The place of a sentence in its file (in columns, its last line), its words, and its tags as the file spells them."""


def _read_list_rows(task: TaskDescription, file: InputFile) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file whose rows hold a list of words and a list of tags."""
    for row in read_rows(RowFormat.from_task(task), file):
        found = []
        for name in (str(task.fields.words), str(task.fields.tags)):
            value = row.value(name)
            if not isinstance(value, list) or not all(isinstance(part, str | int) for part in value):
                raise row.error(f"the field {name!r} is not a list of words or tags")
            found.append([str(part) for part in value])
        if found[0] or found[1]:
            yield row.place, found[0], found[1]


def _read_column_file(task: TaskDescription, file: InputFile) -> Iterator[TaggedSentence]:
    """Yield the sentences of a file with a word on each line and a blank line after each sentence. Columns are
    separated by tabs or, in a line without tabs, by spaces."""
    at = [int(column) - 1 for column in (task.fields.words, task.fields.tags) if column is not None]
    found, place, width = list[list[str]](), "", 0
    for number, line in enumerate(read_lines(file, task.encoding), 1):
        if not line.strip() or line.startswith(_DOCUMENT_SEPARATOR):
            if found:
                yield place, [cells[at[0]] for cells in found], [cells[at[1]] for cells in found]
            found = []
            continue
        place, cells = f"{file.uri}, line {number}", line.split("\t" if "\t" in line else " ")
        width = width or len(cells)
        if len(cells) != width or width <= max(at):
            raise TaskError(
                f"{place}: {len(cells)} columns, but {max(width, max(at) + 1)} are needed",
                remedy="correct the line, or the task's `fields`",
            )
        found.append(cells)
    if found:
        yield place, [cells[at[0]] for cells in found], [cells[at[1]] for cells in found]


def to_bio(tags: Sequence[str], scheme: TagScheme) -> list[str]:
    """Return the tags of a sentence in BIO (IOB2), where every entity begins with B-.

    iob1 (CoNLL-2003 as published): B- only begins an entity that directly follows another of its type.
    bioes: E- ends an entity, S- is an entity of a single word.
    """
    if scheme == "bioes":
        ends = {"E-": "I-", "S-": "B-"}
        return [ends.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]
    if scheme == "bio":
        return list(tags)
    return [
        "B-" + tag[2:] if tag.startswith("I-") and before[2:] != tag[2:] else tag
        for before, tag in zip(["O", *tags], tags, strict=False)
    ]


@dataclass(frozen=True)
class _Question:
    """A question as it was read. `place`: its place in the file, for messages."""

    place: FilePlace
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(task: TaskDescription, files: Sequence[TaskFile], folder: TaskFolder) -> Questions:
    """Return the questions of `files` in their order.

    Raises TaskError if a file is missing or does not hold questions; if two questions have the same id; if an answer is
    not at its place in the context; if a question has no answer, but the task has one for every question.
    """
    seen, taken, broken = dict[str, FilePlace](), list[_Question](), 0
    for path in files:
        file = folder.find_file(str(path))
        for question in _squad_questions(file, task.encoding) if task.format == "squad" else _question_rows(task, file):
            if question.id in seen:
                raise TaskError(
                    f"{question.place}: the id {question.id!r} is used already, at {seen[question.id]}",
                    remedy="give each question a different id: predictions are keyed by the id",
                )
            seen[question.id] = question.place
            placed = _locate_answers(task, question)
            if placed is None:
                broken += 1
            else:
                taken.append(placed)
    if broken:
        _LOG.warning("%s: left out %d questions whose answers are not in their contexts", task.name, broken)
    return Questions(
        ids=tuple(question.id for question in taken),
        questions=tuple(question.question for question in taken),
        contexts=tuple(question.context for question in taken),
        answers=tuple(question.answers for question in taken),
    )


def _locate_answers(task: TaskDescription, question: _Question) -> _Question | None:
    """Return the question with the checked positions of its answers; None if `broken_rows` leaves the question out."""
    if not question.answers and not task.no_answer:
        raise TaskError(
            f"{question.place}: question {question.id} has no answer",
            remedy="set `no_answer: true` in the task if contexts may not answer their questions",
        )
    nearest = task.misplaced_answers == "nearest"
    answers = [_locate_answer(answer, question.context, nearest=nearest) for answer in question.answers]
    if None not in answers:
        return replace(question, answers=tuple(answer for answer in answers if answer is not None))
    if task.broken_rows == "skip":
        return None
    text = question.answers[answers.index(None)].text
    raise TaskError(
        f"{question.place}: question {question.id}: the answer {text!r} is not in the context at answer_start",
        remedy="correct the file; or set in the task `misplaced_answers: nearest` to take the nearest occurrence, or "
        "`broken_rows: skip` to leave such questions out",
    )


def _locate_answer(answer: Answer, context: str, *, nearest: bool) -> Answer | None:
    """Return the answer at its stated place, or else, with `nearest`, at its nearest occurrence; None if not found."""
    text, start = answer.text, answer.start
    if text and start >= 0 and context.startswith(text, start):
        return answer
    before, after = context.rfind(text, 0, max(0, start) + len(text)), context.find(text, max(0, start))
    places = [place for place in (before, after) if place >= 0]
    if not text or not nearest or not places:
        return None
    return Answer(text, min(places, key=lambda place: abs(place - start)))


def _question_rows(task: TaskDescription, file: InputFile) -> Iterator[_Question]:
    fields = task.fields
    for row in read_rows(RowFormat.from_task(task), file):
        yield _Question(
            place=row.place,
            id=row.label(str(fields.id)),
            question=row.text(str(fields.question)),
            context=row.text(str(fields.context)),
            answers=_parse_answers(row.value(str(fields.answers)), row.place),
        )


def _squad_questions(file: InputFile, encoding: str) -> Iterator[_Question]:
    """Yield the questions of a JSON file in SQuAD's format, whose keys are
    `{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}`.

    SQuAD 2.0 adds `is_impossible`; its plausible answers are not accepted answers.
    """
    with open_text(replace(file, encoding=encoding)) as stream:
        data = parse_json_object(stream.read(), file.uri)
    for a, article in enumerate(_require_list(data, "data", file.uri)):
        for p, paragraph in enumerate(_require_list(article, "paragraphs", f"{file.uri}, data {a}")):
            place = f"{file.uri}, data {a}, paragraph {p}"
            context = _require_text(paragraph, "context", place)
            for q, found in enumerate(_require_list(paragraph, "qas", place)):
                at = f"{place}, question {q}"
                impossible = isinstance(found, Mapping) and found.get("is_impossible") is True
                answers = () if impossible else _parse_answers(_require_list(found, "answers", at), at)
                yield _Question(
                    at, _require_text(found, "id", at), _require_text(found, "question", at), context, answers
                )


def _parse_answers(value: object, place: FilePlace) -> tuple[Answer, ...]:
    """Return the answers in `value`: a list of objects, or an object of lists, as the library `datasets` stores
    them."""
    if isinstance(value, Mapping):
        texts, starts = _require_list(value, "text", place), _require_list(value, "answer_start", place)
        if len(texts) != len(starts):
            problem = f"{place}: {len(texts)} answers, but {len(starts)} values of answer_start"
            raise TaskError(problem, remedy="correct the record")
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        problem = f"{place}: the answers are of type {type(value).__name__}, not a list"
        raise TaskError(problem, remedy="correct the record")
    found = [(_require_text(answer, "text", place), answer.get("answer_start")) for answer in value]
    if not all(type(start) is int for _, start in found):
        problem = f"{place}: answer_start of an answer is missing or not a whole number"
        raise TaskError(problem, remedy="correct the record")
    return tuple(dict.fromkeys(Answer(text, start) for text, start in found))


def _require_list(value: object, key: str, place: FilePlace) -> list[Any]:
    found = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(found, list):
        return found
    raise TaskError(f"{place}: no list {key!r}", remedy="write the file in SQuAD's format, with this list")


def _require_text(value: object, key: str, place: FilePlace) -> str:
    found = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(found, str):
        return check_valid_unicode(found, place)
    raise TaskError(f"{place}: no text {key!r}", remedy="write the file in SQuAD's format, with this text")


def read_retrieval(task: TaskDescription, files: Sequence[TaskFile], folder: TaskFolder) -> Retrieval:
    """Return all documents, and the queries with judgements. A judgement without a score counts as 1 (NanoBEIR).

    Raises TaskError if a file or a field of a line is missing; if two texts have the same id; if a judgement names an
    unknown document or query.
    """
    documents, queries = dict[str, str](), dict[str, str]()
    relevant: dict[str, dict[str, int]] = {}
    for file in files:
        assert isinstance(file, RetrievalFiles), "task_issues rejects other files for retrieval"
        _read_texts(folder.find_file(file.corpus), documents)
        _read_texts(folder.find_file(file.queries), queries)
        qrels = folder.find_file(file.qrels)
        for row in read_rows(
            RowFormat(format_from_suffix(qrels.key), (_QUERY_FIELD, _DOCUMENT_FIELD), (_SCORE_FIELD,)), qrels
        ):
            _add_judgement(row, queries, documents, relevant)
    return Retrieval({query: queries[query] for query in relevant}, documents, relevant)


def _read_texts(file: InputFile, texts: dict[str, str]) -> None:
    """Add the texts of a file to `texts`, by id. A title is put before its text."""
    for row in read_rows(RowFormat(format_from_suffix(file.key), ("_id", "text"), ("title",)), file):
        name = row.label("_id")
        if name in texts:
            raise row.error(f"the id {name!r} is used already", "give each text a different id")
        title = row.text("title") if row.values.get("title") else ""
        texts[name] = f"{title} {row.text('text')}".strip()


def _add_judgement(
    row: FileRow, queries: dict[str, str], documents: dict[str, str], relevant: dict[str, dict[str, int]]
) -> None:
    query, document = row.label(_QUERY_FIELD), row.label(_DOCUMENT_FIELD)
    for name, texts, what in ((query, queries, "query"), (document, documents, "document")):
        if name not in texts:
            remedy = "use the documents, queries and judgements (qrels) of the same publication"
            raise row.error(f"there is no {what} {name!r}", remedy)
    score, given = math.nan, row.values.get(_SCORE_FIELD)
    with suppress(ValueError):
        score = 1.0 if given is None else float(str(given))
    if not score.is_integer():
        raise row.error(f"the score {given!r} is not a whole number", "correct the line")
    found = relevant.setdefault(query, {})
    if document in found:
        remedy = "keep one of the two judgements"
        raise row.error(f"document {document!r} is judged twice for query {query!r}", remedy)
    if score >= 1:
        found[document] = int(score)
