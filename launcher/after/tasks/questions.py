"""Readers of questions about contexts (SQuAD's JSON, versions 1.1 and 2.0, also CMRC 2018; or rows of jsonl and
Parquet), and of retrieval tasks in local files, as BEIR, MTEB and NanoBEIR publish them.

Each of documents, queries and judgements (qrels) is a file of JSON lines or Parquet; judgements may also be TSV with a
first line of names. The fields have their published names: `_id`, `title`, `text`; `query-id`, `corpus-id`, `score`.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from data_service.ingest.inputs import InputFile
from launcher.after.tasks.examples import Answer, Questions, Retrieval
from launcher.after.tasks.files import FilePosition, TaskFolder, read_whole
from launcher.after.tasks.rows import FileRow, RowFormat, layout_of, read_rows, valid_text
from launcher.after.tasks.schema import Description, File, Format, Judged
from launcher.errors import TaskError

_log = logging.getLogger("launcher.after.tasks")


@dataclass(frozen=True)
class _Question:
    """A question as it was read. `place`: its place in the file, for messages."""

    place: str
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


class _Misplaced(Exception):
    """The error for an answer that is not at its place in the context. Its text is the problem."""


def read_questions(task: Description, files: Sequence[File], folder: TaskFolder) -> Questions:
    """Return the questions of `files` in their order.

    Raises:
        TaskError: if a file is missing or does not hold questions; if two questions have the same id; if an answer is
            not at its place in the context; if a question has no answer, but the task has one for every question.
    """
    seen: dict[str, str] = {}
    taken: list[_Question] = []
    broken = 0
    for path in files:
        assert isinstance(path, str), "refused with the task"
        file = folder.find(path)
        for question in _squad(file, task.encoding) if task.format == "squad" else _rows(task, file):
            if question.id in seen:
                raise TaskError(
                    f"{question.place}: the id {question.id!r} is there already, at {seen[question.id]}",
                    remedy="give each question a different id: predictions are keyed by the id",
                )
            seen[question.id] = question.place
            try:
                taken.append(_placed(task, question))
            except _Misplaced as problem:
                if task.broken_rows == "error":
                    raise TaskError(
                        f"{question.place}: {problem}",
                        remedy="correct the file; `misplaced_answers: nearest` takes the nearest occurrence, "
                        "`broken_rows: skip` leaves such questions out",
                    ) from problem
                broken += 1
    if broken:
        _log.warning("%s: left out %d questions whose answers are not in their contexts", task.name, broken)
    return Questions(
        ids=tuple(question.id for question in taken),
        questions=tuple(question.question for question in taken),
        contexts=tuple(question.context for question in taken),
        answers=tuple(question.answers for question in taken),
    )


def _placed(task: Description, question: _Question) -> _Question:
    if not question.answers and not task.no_answer:
        raise TaskError(
            f"{question.place}: question {question.id} has no answer",
            remedy="set `no_answer: true` in the task if contexts may not answer their questions",
        )
    answers = tuple(_answer(task, question, answer) for answer in question.answers)
    return _Question(question.place, question.id, question.question, question.context, answers)


def _answer(task: Description, question: _Question, answer: Answer) -> Answer:
    text, start, context = answer.text, answer.start, question.context
    if text and start >= 0 and context.startswith(text, start):
        return answer
    if text and task.misplaced_answers == "nearest":
        before, after = context.rfind(text, 0, max(0, start) + len(text)), context.find(text, max(0, start))
        if places := [place for place in (before, after) if place >= 0]:
            return Answer(text, min(places, key=lambda place: abs(place - start)))
    found = context[max(0, start) : max(0, start) + len(text)]
    raise _Misplaced(
        f"question {question.id}: the answer {text!r} is not at character {start}, where {found!r} stands"
    )


def _rows(task: Description, file: InputFile) -> Iterator[_Question]:
    fields = task.fields
    for row in read_rows(layout_of(task), file):
        yield _Question(
            place=str(row.place),
            id=row.label(str(fields.id)),
            question=row.text(str(fields.question)),
            context=row.text(str(fields.context)),
            answers=_answers(row.value(str(fields.answers)), str(row.place)),
        )


def _squad(file: InputFile, encoding: str) -> Iterator[_Question]:
    """`{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}`.

    SQuAD 2.0 adds `is_impossible`; its plausible answers are not accepted answers.
    """
    try:
        data = json.loads(read_whole(file, encoding))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file.uri}: not JSON: {error}", remedy="fetch the file again") from error
    for a, article in enumerate(_items(data, "data", file.uri)):
        for p, paragraph in enumerate(_items(article, "paragraphs", f"{file.uri}, data {a}")):
            place = f"{file.uri}, data {a}, paragraph {p}"
            context = _text(paragraph, "context", place)
            for q, question in enumerate(_items(paragraph, "qas", place)):
                yield _question(question, context, f"{place}, question {q}")


def _question(question: object, context: str, place: str) -> _Question:
    impossible = isinstance(question, Mapping) and question.get("is_impossible") is True
    return _Question(
        place=place,
        id=_text(question, "id", place),
        question=_text(question, "question", place),
        context=context,
        answers=() if impossible else _answers(_items(question, "answers", place), place),
    )


def _answers(value: object, place: str) -> tuple[Answer, ...]:
    """Return the answers in `value`: a list of objects, or an object of lists, as the library `datasets` stores
    them."""
    if isinstance(value, Mapping):
        texts, starts = _items(value, "text", place), _items(value, "answer_start", place)
        if len(texts) != len(starts):
            raise TaskError(
                f"{place}: {len(texts)} answers, but {len(starts)} values of answer_start",
                remedy="correct the record",
            )
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise TaskError(
            f"{place}: the answers are of type {type(value).__name__}, not a list",
            remedy="correct the record",
        )
    return tuple(dict.fromkeys(_one_answer(answer, place) for answer in value))


def _one_answer(answer: object, place: str) -> Answer:
    start = answer.get("answer_start") if isinstance(answer, Mapping) else None
    if not isinstance(start, int) or isinstance(start, bool):
        raise TaskError(
            f"{place}: answer_start of an answer is missing or not a whole number",
            remedy="correct the record",
        )
    return Answer(_text(answer, "text", place), start)


def _items(value: object, key: str, place: str) -> list[object]:
    found = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(found, list):
        return found
    raise TaskError(f"{place}: no list {key!r}", remedy="write the file in the format of SQuAD")


def _text(value: object, key: str, place: str) -> str:
    found = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(found, str):
        return valid_text(found, place)
    raise TaskError(f"{place}: no text {key!r}", remedy="write the file in the format of SQuAD")


_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".tsv": "tsv"}
_QUERY, _DOCUMENT, _SCORE = "query-id", "corpus-id", "score"


def read_retrieval(task: Description, files: Sequence[File], folder: TaskFolder) -> Retrieval:
    """Return all documents, and the queries that are judged. A judgement without a score counts as 1 (NanoBEIR).

    Raises:
        TaskError: if a file or a field of a line is missing; if two texts have the same id; if a judgement has the id
            of no document or query.
    """
    documents: dict[str, str] = {}
    queries: dict[str, str] = {}
    relevant: dict[str, dict[str, int]] = {}
    for file in files:
        assert isinstance(file, Judged), "refused with the task"
        _read_texts(folder.find(file.corpus), documents)
        _read_texts(folder.find(file.queries), queries)
        for row in _read(folder.find(file.qrels), (_QUERY, _DOCUMENT), (_SCORE,)):
            _judge(row, queries, documents, relevant)
    return Retrieval({query: queries[query] for query in relevant}, documents, relevant)


def _read_texts(file: InputFile, texts: dict[str, str]) -> None:
    """Add the texts of a file to `texts`, by id. A title is put before its text."""
    for row in _read(file, ("_id", "text"), ("title",)):
        name = row.label("_id")
        if name in texts:
            raise TaskError(
                f"{row.place}: the id {name!r} is there already", remedy="give each text a different id"
            )
        title = row.text("title") if row.values.get("title") else ""
        texts[name] = f"{title} {row.text('text')}".strip()


def _judge(
    row: FileRow, queries: dict[str, str], documents: dict[str, str], relevant: dict[str, dict[str, int]]
) -> None:
    query, document = row.label(_QUERY), row.label(_DOCUMENT)
    for name, texts, what in ((query, queries, "query"), (document, documents, "document")):
        if name not in texts:
            raise TaskError(
                f"{row.place}: there is no {what} {name!r}",
                remedy="use the documents, queries and judgements (qrels) of the same publication",
            )
    given = row.values.get(_SCORE)
    score = 1.0 if given is None else _number(given, row.place)
    found = relevant.setdefault(query, {})
    if document in found:
        raise TaskError(
            f"{row.place}: document {document!r} is judged twice for query {query!r}",
            remedy="keep one of the two judgements",
        )
    if score >= 1:
        found[document] = int(score)


def _number(value: object, place: FilePosition) -> float:
    with suppress(ValueError):
        score = float(str(value))
        if score.is_integer():
            return score
    raise TaskError(f"{place}: the score {value!r} is not a whole number", remedy="correct the line")


def _read(file: InputFile, wanted: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[FileRow]:
    name = file.key.lower().removesuffix(".gz").removesuffix(".zst")
    for ending, form in _FORMATS.items():
        if name.endswith(ending):
            return read_rows(RowFormat(form, wanted, optional), file)
    raise TaskError(
        f"{file.uri}: not a .jsonl, .parquet or .tsv file", remedy="name a file of one of these formats"
    )
