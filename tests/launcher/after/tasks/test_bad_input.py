"""Files that cannot be used: each mistake is named with its file, its line and what to do. Descriptions and files that
are changed at random give a result or an error of ours, never a traceback."""

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

from data_service.errors import InputError, UserError
from launcher.after.tasks.summary import summarise_splits
from launcher.after.tasks.task import Task, parse_task, task_digest
from launcher.errors import TaskError
from tests.support.faults.files import VALUES, altered, damaged
from tests.support.tasks import published_folders

PAIRS: dict[str, object] = {
    "name": "mine",
    "kind": "pair_classification",
    "published": "https://example.org",
    "format": "tsv",
    "fields": {"first": "a", "second": "b", "label": "y"},
    "labels": ["no", "yes"],
    "metrics": ["accuracy", "matthews"],
}
SCORES = {**PAIRS, "kind": "regression", "labels": [], "metrics": ["pearson"], "score_range": [0.0, 5.0]}
JSON = {**PAIRS, "format": "jsonl"}
TAGS: dict[str, object] = {
    **PAIRS,
    "kind": "tagging",
    "format": "columns",
    "fields": {"words": 1, "tags": 2},
    "labels": ["O", "B-PER", "I-PER"],
    "metrics": ["entity_f1"],
}
LINES = {**PAIRS, "kind": "classification", "fields": {}}
LISTS = {**TAGS, "format": "jsonl", "fields": {"words": "words", "tags": "tags"}}
SPAN: dict[str, object] = {
    "name": "mine",
    "kind": "span",
    "published": "https://example.org",
    "format": "squad",
    "metrics": ["answer_f1"],
}


def made(described: Mapping[str, object], root: Path, content: str | bytes, **more: object) -> Task:
    """The task over one file, its split dev."""
    data = content if isinstance(content, bytes) else content.encode()
    (root / "dev").write_bytes(data)
    return parse_task(json.dumps({"files": {"dev": "dev"}, **described, **more}), "mine.yaml", str(root))


def question(text: str, start: object, name: str = "q1") -> dict[str, object]:
    return {"id": name, "question": "?", "answers": [{"text": text, "answer_start": start}]}


TABLES: list[tuple[Mapping[str, object], str, str, str]] = [
    (PAIRS, "a\tb\ty\nx\tz\tmaybe\n", "line 2: the label 'maybe' is not one of no, yes", "labels"),
    (PAIRS, "a\tb\ty\nx\tz\tno\nx\tno\n", "line 3: 2 fields", "broken_rows"),
    (PAIRS, "a\tc\ty\n", "no column 'b' in its first line", "fields"),
    (PAIRS, "a\tb\tb\ty\n", "two columns 'b'", "fields"),
    (PAIRS, "", "no column 'a'", "fields"),
    (PAIRS, "a\tb\ty\n", "the split dev of the task mine is empty", "files"),
    ({**PAIRS, "quotes": True}, 'a\tb\ty\n"x" y\tz\tno\n', "line 2: not TSV", "quotes: false"),
    (
        {**PAIRS, "fields": {"first": 1, "second": 2, "label": 5}},
        "x\tz\tno\n",
        "line 1: 3 fields, but column 5 is needed",
        "broken_rows",
    ),
    (SCORES, "a\tb\ty\nx\tz\tnan\n", "line 2: the score 'nan' is not a finite number", "skip_labels"),
    (SCORES, "a\tb\ty\nx\tz\tinf\n", "line 2: the score 'inf' is not a finite number", "skip_labels"),
    (SCORES, "a\tb\ty\nx\tz\t\n", "line 2: the score '' is not a finite number", "skip_labels"),
    (SCORES, "a\tb\ty\nx\tz\t5.01\n", "line 2: the score '5.01'", "score_range"),
    (JSON, '{"a": "x", "b": "z", "y": "no"}\n{"a": "x", "y": "no"}\n', "line 2: the field 'b' is missing", "fields"),
    (JSON, '{"a": "x", "b": null, "y": "no"}\n', "line 1: the field 'b' is null", "fields"),
    (JSON, '{"a": "x", "b": 3, "y": "no"}\n', "line 1: the field 'b' is int, not text", "fields"),
    (JSON, '{"a": "x", "b": "\\ud800", "y": "no"}\n', "line 1: character 0 is half a surrogate", "record"),
    (JSON, '{"a": "x", "b": "z", "y": []}\n', "line 1: the label is list", "fields"),
    (JSON, '\n[1]\n', "line 2: a JSON list, not an object", "object on each line"),
    (JSON, "[\n{}\n]", "line 1: not JSON", "jq -c"),
    ({**JSON, "label_ids": True}, '{"a": "x", "b": "z", "y": 2}\n', "label '2' is not an index below 2", "labels"),
    ({**LINES, "format": "trec"}, "no:x y z\nno z\n", "line 2: the line is not LABEL:detail, a space", "line"),
    ({**LINES, "format": "label_first"}, "no z\nyes \n", "line 2: the line is not a label, a space and a text", "line"),
    (TAGS, "Peter B-PER\nSmith\n", "line 2: 1 columns, but 2 are needed", "fields"),
    (TAGS, "Peter B-PER\nSmith I-LOC\n", "line 2: the label 'I-LOC' is not one of", "labels"),
    (LISTS, '{"words": ["a", "b"], "tags": ["O"]}\n', "line 1: 2 words, but 1 tags", "record"),
    (LISTS, '{"words": "a b", "tags": ["O"]}\n', "line 1: the field 'words' is not a list", "fields"),
    (SPAN, "{", "not JSON", "correct"),
    (SPAN, '{"data": [{}]}', "data 0: no list 'paragraphs'", "SQuAD"),
    (SPAN, published_folders.squad_json(("a b", [question("b", 1)])), "answer 'b'", "nearest"),
    (SPAN, published_folders.squad_json(("a b", [question("b", -2)])), "answer 'b'", "nearest"),
    (SPAN, published_folders.squad_json(("a b", [question("b", 99)])), "answer 'b'", "skip"),
    (SPAN, published_folders.squad_json(("a b", [question("b", None)])), "not a whole number", "record"),
    (
        SPAN,
        published_folders.squad_json(("a b", [question("b", 2), question("a", 0)])),
        "question 1: the id 'q1' is used already",
        "a different id",
    ),
    (
        SPAN,
        published_folders.squad_json(("a b", [{"id": "q", "question": "?", "answers": []}])),
        "question q has no answer",
        "no_answer: true",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("described", "content", "problem", "remedy"), TABLES)
def test_what_cannot_be_used_is_named(
    described: Mapping[str, object], content: str, problem: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError) as caught:
        made(described, tmp_path, content).read("dev")
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    if "empty" not in problem:
        assert str(tmp_path / "dev") in caught.value.problem


def test_bytes_that_are_not_in_the_encoding(tmp_path: Path) -> None:
    content = ("a\tb\ty\n" + "René Müller, Köln\tz\tno\n" * 9).encode("latin-1")
    with pytest.raises(TaskError, match=r"line 2: byte 3 .*\butf-8") as caught:
        made(PAIRS, tmp_path, content).read("dev")
    assert "`encoding: cp1252`" in caught.value.remedy
    found = made(PAIRS, tmp_path, content, encoding="latin-1").read("dev")
    assert found.first == ("René Müller, Köln",) * 9  # type: ignore[union-attr]
    with pytest.raises(TaskError, match=r"line 2: .*\bshift_jis\b"):
        made(PAIRS, tmp_path, b"a\tb\ty\nx\xff\tz\tno\n", encoding="shift_jis").read("dev")


def test_encodings_and_delimiters_that_cannot_be(tmp_path: Path) -> None:
    for more in ({"encoding": "utf-9"}, {"encoding": "rot13"}, {"delimiter": ";;"}, {"delimiter": ""}):
        with pytest.raises(TaskError, match=next(iter(more))):
            made(PAIRS, tmp_path, b"", **more)
    table = b"a;b;c;y\nx;z;w;no\n"
    with pytest.raises(TaskError, match=r"\ba;b;c;y\b") as caught:
        made(PAIRS | {"fields": {"first": "a", "second": "q", "label": "y"}}, tmp_path, table).read("dev")
    assert "`delimiter`" in caught.value.remedy
    numbers = PAIRS | {"fields": {"first": 1, "second": 2, "label": 4}}
    with pytest.raises(TaskError, match=r"line 1: 1 fields\b.*\bcolumn 4\b") as caught:
        made(numbers, tmp_path, table).read("dev")
    assert "`delimiter`" in caught.value.remedy
    assert len(made(numbers, tmp_path, table.split(b"\n")[1], delimiter=";").read("dev")) == 1


def test_a_damaged_archive_and_no_parquet(tmp_path: Path) -> None:
    task = made(PAIRS, tmp_path, "", files={"dev": "dev.tsv"})
    (tmp_path / "dev.tsv.gz").write_bytes(b"\x1f\x8b\x08 not gzip")
    with pytest.raises(InputError, match=r"damaged.* data"):
        task.read("dev")
    with pytest.raises(TaskError, match=r"\bParquet\b"):
        made({**PAIRS, "format": "parquet"}, tmp_path, "a,b,y\n").read("dev")


def test_broken_records_are_left_out_where_the_task_says_so(tmp_path: Path) -> None:
    rows = made(PAIRS, tmp_path, "a\tb\ty\nx\tno\nx\tz\tyes\n", broken_rows="skip").read("dev")
    assert len(rows) == 1
    content = published_folders.squad_json(("a b", [question("c", 1), question("b", 2, "q2")]))
    assert len(made(SPAN, tmp_path, content, broken_rows="skip").read("dev")) == 1


def test_the_nearest_occurrence_of_a_misplaced_answer(tmp_path: Path) -> None:
    context = "b a b a b"
    for start, right in ((0, 0), (1, 0), (3, 4), (5, 4), (7, 8), (99, 8), (-5, 0)):
        content = published_folders.squad_json((context, [question("b", start)]))
        examples = made(SPAN, tmp_path, content, misplaced_answers="nearest").read("dev")
        assert examples.answers[0][0].start == right, start  # type: ignore[union-attr]


def test_gold_files_of_another_length(tmp_path: Path) -> None:
    described = {
        **SCORES,
        "fields": {"first": 1, "second": 2},
        "files": {"dev": {"path": "dev", "gold": "gold"}},
    }
    for gold in ("1\n", "1\n2\n3\n"):
        (tmp_path / "gold").write_text(gold)
        with pytest.raises(TaskError, match=rf"\b2 lines\b.*gold.*\b{gold.count(chr(10))}\b"):
            made(described, tmp_path, "a\tb\nc\td\n").read("dev")


PARTS = {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "qrels.tsv"}
BEIR: dict[str, object] = {
    "name": "mine",
    "kind": "retrieval",
    "published": "x",
    "format": "beir",
    "metrics": ["ndcg@10"],
    "files": {"test": PARTS},
}
QRELS = "query-id\tcorpus-id\tscore\n"
TEXTS = '{"_id": "1", "text": "x"}\n'


@pytest.mark.parametrize(
    ("corpus", "queries", "qrels", "problem"),
    [
        (TEXTS + TEXTS, TEXTS, QRELS, "line 2: the id '1' is used already"),
        (TEXTS, TEXTS, f"{QRELS}1\t2\t1\n", "line 2: there is no document '2'"),
        (TEXTS, TEXTS, f"{QRELS}2\t1\t1\n", "line 2: there is no query '2'"),
        (TEXTS, TEXTS, f"{QRELS}1\t1\t1\n1\t1\t1\n", "line 3: document '1' is judged twice"),
        (TEXTS, TEXTS, f"{QRELS}1\t1\thigh\n", "line 2: the score 'high' is not a whole number"),
        (TEXTS, TEXTS, f"{QRELS}1\t1\tnan\n", "line 2: the score 'nan' is not a whole number"),
        (TEXTS, TEXTS, f"{QRELS}1\t1\tinf\n", "line 2: the score 'inf' is not a whole number"),
        (TEXTS, TEXTS, "1\t1\t1\n", "no column 'query-id'"),
        ('{"_id": "1"}\n', TEXTS, QRELS, "line 1: the field 'text' is missing"),
        (TEXTS, TEXTS, QRELS, "is empty"),
    ],
)
def test_a_bad_retrieval_file_is_named(corpus: str, queries: str, qrels: str, problem: str, tmp_path: Path) -> None:
    for name, content in zip(PARTS.values(), (corpus, queries, qrels), strict=True):
        (tmp_path / name).write_text(content)
    task = parse_task(json.dumps(BEIR), "mine.yaml", str(tmp_path))
    with pytest.raises(TaskError) as caught:
        task.read("test")
    assert problem in caught.value.problem


ROWS = [("a b", "c d", "no"), ("ö", "x\u3000y", "yes"), ("e", "f", "no")]
READ = {**SPAN, "no_answer": True}
ASKED = {"id": "id", "question": "question", "context": "context", "answers": "answers"}


def table(delimiter: str) -> bytes:
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter).writerows([("a", "b", "y"), *ROWS])
    return written.getvalue().encode()


def parquet() -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table(dict(zip("aby", map(list, zip(*ROWS, strict=True)), strict=True))), written)
    return written.getvalue()


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


Case = tuple[Mapping[str, object], Mapping[str, bytes]]
CASES: dict[str, Case] = {
    "tsv": (PAIRS, {"dev": table("\t")}),
    "csv": ({**PAIRS, "format": "csv"}, {"dev": table(",")}),
    "jsonl": (JSON, {"dev": lines(*(dict(zip("aby", row, strict=True)) for row in ROWS))}),
    "parquet": ({**PAIRS, "format": "parquet"}, {"dev": parquet()}),
    "gz": (PAIRS, {"dev.gz": gzip.compress(table("\t"))}),
    "held out": ({**PAIRS, "files": {"train": "f"}, "held_out": {"dev": 0.5}}, {"f": table("\t")}),
    "classes": (
        {
            **LINES,
            "format": "txt",
            "files": {"dev": [{"path": "f", "label": "no"}, {"path": "g", "label": "yes"}]},
        },
        {"f": b"a b\n", "g": b"c\nd\n"},
    ),
    "trec": ({**LINES, "format": "trec"}, {"dev": b"no:x a b\nyes:y c\n"}),
    "gold": (
        {
            **SCORES,
            "kind": "similarity",
            "fields": {"first": 1, "second": 2},
            "skip_labels": [""],
            "files": {"dev": {"path": "f", "gold": "g"}},
            "metrics": ["spearman"],
        },
        {"f": b"a\tb\nc\td\ne\tf\n", "g": b"1.5\n\n3\n"},
    ),
    "columns": (TAGS, {"dev": b"-DOCSTART- O\n\na B-PER\nb I-PER\n\nc O\n"}),
    "lists": (LISTS, {"dev": lines({"words": ["a", "b"], "tags": ["O", "B-PER"]})}),
    "squad": (READ, {"dev": published_folders.squad_json(("a b", [question("b", 2)])).encode()}),
    "questions": (
        {**READ, "format": "jsonl", "fields": ASKED},
        {"dev": lines({**question("b", 2), "context": "a b"})},
    ),
    "beir": (
        BEIR,
        {
            "corpus.jsonl": lines({"_id": "1", "title": "t", "text": "x"}),
            "queries.jsonl": lines({"_id": "1", "text": "x"}),
            "qrels.tsv": f"{QRELS}1\t1\t1\n".encode(),
        },
    ),
}


def case(name: str) -> Case:
    described, files = CASES[name]
    return {"files": {"dev": "dev"}, **described}, files


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
    described, files = case(name)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    task = parse_task(json.dumps(described), "mine.yaml", str(tmp_path))
    assert all(len(task.read(split)) for split in task.splits)


@pytest.mark.parametrize("first", [b"a,b,y\ra b,c d,no\n", b'"a,b,y\n', b"a," + b"b" * 200_000 + b",y\n", b"\0\n"])
def test_a_first_line_that_is_no_csv_is_refused(first: bytes, tmp_path: Path) -> None:
    """It is read before the others, to find what stands between its columns."""
    (tmp_path / "dev").write_bytes(first + b"1,2,no\n")
    with pytest.raises(TaskError, match=r"\bdev\b"):
        parse_task(json.dumps(case("csv")[0]), "mine.yaml", str(tmp_path)).read("dev")


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_damaged(data: st.DataObject, tmp_path: Path) -> None:
    """Files, and a description as it is, with one value changed or with further keys, in JSON or YAML, whole or not."""
    described, files = case(data.draw(st.sampled_from(sorted(CASES))))
    changed = data.draw(st.one_of(st.just(described), altered(described)))
    if isinstance(changed, dict):
        changed = changed | data.draw(st.dictionaries(st.sampled_from(sorted(Task.model_fields)), VALUES, max_size=2))
    text = json.dumps(changed) if data.draw(st.booleans()) else yaml.safe_dump(changed)
    if data.draw(st.booleans()):
        text = data.draw(damaged(text.encode())).decode("utf-8", "surrogateescape")
    spoilt = {name: data.draw(st.one_of(st.just(part), damaged(part))) for name, part in files.items()}
    read_all(text, spoilt, tmp_path)
