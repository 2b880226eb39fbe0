"""Retrieval from local files, as BEIR, MTEB and NanoBEIR publish it: documents, queries and judgements (qrels).

Each of the three is JSON lines or Parquet, judgements also TSV with a first line of names. Names of the fields are
theirs: `_id`, `title`, `text`; `query-id`, `corpus-id`, `score`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from data_service.ingest.inputs import InputFile
from launcher.after.tasks.examples import Retrieval
from launcher.after.tasks.files import FilePosition, TaskFolder
from launcher.after.tasks.rows import FileRow, RowFormat, read_rows
from launcher.after.tasks.schema import Description, File, Format, Judged
from launcher.errors import TaskError

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".tsv": "tsv"}
_QUERY, _DOCUMENT, _SCORE = "query-id", "corpus-id", "score"


def read_retrieval(task: Description, files: Sequence[File], folder: TaskFolder) -> Retrieval:
    """All documents, and the queries that have a relevant one. A judgement without a score is 1 (NanoBEIR).

    Raises:
        TaskError: a file that is missing, a field missing in a line, an id that is there twice or, in the judgements,
            that no document or query has.
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
    judged = {query: found for query, found in relevant.items() if found}
    return Retrieval({query: queries[query] for query in judged}, documents, judged)


def _read_texts(file: InputFile, texts: dict[str, str]) -> None:
    """Adds a file's texts by id: the title, where there is one, goes before the text."""
    for row in _read(file, ("_id", "text"), ("title",)):
        name = row.label("_id")
        if name in texts:
            raise TaskError(
                f"{row.place}: the id {name!r} is there already", remedy="give each text an id of its own"
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
                f"{row.place}: there is no {what} {name!r}", remedy="the three files belong together"
            )
    given = row.values.get(_SCORE)
    score = 1.0 if given is None else _number(given, row.place)
    found = relevant.setdefault(query, {})
    if document in found:
        raise TaskError(
            f"{row.place}: document {document!r} is judged twice for query {query!r}", remedy="keep one"
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
    raise TaskError(f"{file.uri}: no .jsonl, .parquet or .tsv", remedy="name files of one of these kinds")
