"""Descriptions and files of tasks, changed at random: a result or an error that names them, never a traceback."""

import csv
import gzip
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import UserError
from launcher.after.tasks.summary import summarise_splits
from launcher.after.tasks.task import Task, parse_task, task_digest
from launcher.errors import TaskError
from tests.support.faults.files import VALUES, altered, damaged
from tests.support.tasks import published_folders

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
KEYS = st.sampled_from(sorted(Task.model_fields))
ROWS = [("a b", "c d", "no"), ("ö", "x\u3000y", "yes"), ("e", "f", "no")]
_COMMON = {"name": "mine", "published": "here"}
_PAIRS = {
    **_COMMON,
    "kind": "pair_classification",
    "fields": {"first": "a", "second": "b", "label": "y"},
    "labels": ["no", "yes"],
    "metrics": ["accuracy", "matthews"],
}
_TEXTS = {**_COMMON, "kind": "classification", "labels": ["no", "yes"], "metrics": ["accuracy"]}
_TAGS = {**_COMMON, "kind": "tagging", "labels": ["O", "B-X", "I-X"], "metrics": ["entity_f1"]}
_SPANS: dict[str, object] = {**_COMMON, "kind": "span", "no_answer": True, "metrics": ["answer_f1"]}
_QUESTION: dict[str, object] = {"id": "1", "question": "?", "answers": [{"text": "b", "answer_start": 2}]}


def _table(delimiter: str) -> bytes:
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter).writerows([("a", "b", "y"), *ROWS])
    return written.getvalue().encode()


def _parquet() -> bytes:
    columns = list(zip(*ROWS, strict=True))
    written = io.BytesIO()
    pq.write_table(pa.table(dict(zip("aby", map(list, columns), strict=True))), written)
    return written.getvalue()


def _lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


Case = tuple[Mapping[str, object], Mapping[str, bytes]]
CASES: dict[str, Case] = {
    "tsv": ({**_PAIRS, "format": "tsv", "files": {"dev": "f"}}, {"f": _table("\t")}),
    "csv": ({**_PAIRS, "format": "csv", "files": {"dev": "f"}}, {"f": _table(",")}),
    "jsonl": (
        {**_PAIRS, "format": "jsonl", "files": {"dev": "f"}},
        {"f": _lines(*(dict(zip("aby", row, strict=True)) for row in ROWS))},
    ),
    "parquet": ({**_PAIRS, "format": "parquet", "files": {"dev": "f"}}, {"f": _parquet()}),
    "gz": ({**_PAIRS, "format": "tsv", "files": {"dev": "f"}}, {"f.gz": gzip.compress(_table("\t"))}),
    "held out": (
        {**_PAIRS, "format": "tsv", "files": {"train": "f"}, "held_out": {"dev": 0.5}},
        {"f": _table("\t")},
    ),
    "classes": (
        {
            **_TEXTS,
            "format": "txt",
            "files": {"dev": [{"path": "f", "label": "no"}, {"path": "g", "label": "yes"}]},
        },
        {"f": b"a b\n", "g": b"c\nd\n"},
    ),
    "trec": ({**_TEXTS, "format": "trec", "files": {"dev": "f"}}, {"f": b"no:x a b\nyes:y c\n"}),
    "gold": (
        {
            **_COMMON,
            "kind": "similarity",
            "format": "tsv",
            "fields": {"first": 1, "second": 2},
            "score_range": [0, 5],
            "skip_labels": [""],
            "files": {"dev": {"path": "f", "gold": "g"}},
            "metrics": ["spearman"],
        },
        {"f": b"a\tb\nc\td\ne\tf\n", "g": b"1.5\n\n3\n"},
    ),
    "columns": (
        {**_TAGS, "format": "columns", "fields": {"words": 1, "tags": 2}, "files": {"dev": "f"}},
        {"f": b"-DOCSTART- O\n\na B-X\nb I-X\n\nc O\n"},
    ),
    "lists": (
        {**_TAGS, "format": "jsonl", "fields": {"words": "w", "tags": "t"}, "files": {"dev": "f"}},
        {"f": _lines({"w": ["a", "b"], "t": ["O", "B-X"]})},
    ),
    "squad": (
        {**_SPANS, "format": "squad", "files": {"dev": "f"}},
        {"f": published_folders.squad_json(("a b", [_QUESTION])).encode()},
    ),
    "questions": (
        {
            **_SPANS,
            "format": "jsonl",
            "fields": {"id": "id", "question": "question", "context": "context", "answers": "answers"},
            "files": {"dev": "f"},
        },
        {"f": _lines({**_QUESTION, "context": "a b"})},
    ),
    "beir": (
        {
            **_COMMON,
            "kind": "retrieval",
            "format": "beir",
            "files": {"test": {"corpus": "c.jsonl", "queries": "q.jsonl", "qrels": "r.tsv"}},
            "metrics": ["ndcg@10"],
        },
        {
            "c.jsonl": _lines({"_id": "1", "title": "t", "text": "x"}),
            "q.jsonl": _lines({"_id": "1", "text": "x"}),
            "r.tsv": b"query-id\tcorpus-id\tscore\n1\t1\t1\n",
        },
    ),
}


def read_all(text: str, files: Mapping[str, bytes], folder: Path) -> None:
    """All that commands do with a task before a model sees it. Raises UserError only."""
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with suppress(UserError):
        task = parse_task(text, "mine.yaml", str(folder))
        list(summarise_splits(task))
        assert len(task_digest(task)) == 64


@pytest.mark.parametrize("name", CASES)
def test_good_ones_are_read(name: str, tmp_path: Path) -> None:
    described, files = CASES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    task = parse_task(json.dumps(described), "mine.yaml", str(tmp_path))
    assert all(len(task.read(split)) for split in task.splits)


@pytest.mark.parametrize(
    "first", [b"a,b,y\ra b,c d,no\n", b'"a,b,y\n', b"a," + b"b" * 200_000 + b",y\n", b"\0\n"]
)
def test_a_first_line_that_is_no_csv_is_refused(first: bytes, tmp_path: Path) -> None:
    """It is read before the others, to find what stands between its columns."""
    (tmp_path / "f").write_bytes(first + b"1,2,no\n")
    with pytest.raises(TaskError, match=r"\bf\b"):
        parse_task(json.dumps(CASES["csv"][0]), "mine.yaml", str(tmp_path)).read("dev")


@pytest.mark.long
@settings(ANY, max_examples=5000)
@given(data=st.data())
def test_anything_damaged(data: st.DataObject, tmp_path: Path) -> None:
    """Files, and a description as it is, with one value changed or with further keys, in JSON or YAML, whole or not."""
    described, files = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    changed = data.draw(st.one_of(st.just(described), altered(described)))
    if isinstance(changed, dict):
        changed = changed | data.draw(st.dictionaries(KEYS, VALUES, max_size=2))
    text = json.dumps(changed) if data.draw(st.booleans()) else yaml.safe_dump(changed)
    if data.draw(st.booleans()):
        text = data.draw(damaged(text.encode())).decode("utf-8", "surrogateescape")
    spoilt = {name: data.draw(st.one_of(st.just(part), damaged(part))) for name, part in files.items()}
    read_all(text, spoilt, tmp_path)
