"""Rows to train on: the same from every form of file, and every mistake with its place and a remedy."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.after.embed.rows import read_text_columns
from launcher.after.embed.settings import RowSource, load_settings
from launcher.errors import RecipeError, TaskError

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=30).filter(str.strip)
ROWS = st.lists(st.tuples(TEXT, TEXT, st.floats(0, 5)), min_size=1, max_size=12)
PAIRS: dict[str, Any] = {"texts": ("a", "b"), "label": "score", "scores": (0.0, 5.0)}


def write(folder: Path, rows: list[tuple[str, str, float]], form: str) -> str:
    """A file of `rows` in one of the forms."""
    path = folder / f"rows.{form}"
    names = ("a", "b", "score")
    match form:
        case "parquet":
            pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), path)
        case "jsonl" | "jsonl.gz":
            text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
            path.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
        case "csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([names, *rows])
        case _:
            path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [names, *rows]), encoding="utf-8")
    return path.name


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(ROWS)
def test_every_form_holds_the_same(tmp_path: Path, rows: list[tuple[str, str, float]]) -> None:
    found = [
        read_text_columns(RowSource(files=(write(tmp_path, rows, form),), **PAIRS), str(tmp_path))
        for form in ("jsonl", "jsonl.gz", "csv", "tsv", "parquet")
    ]
    assert all(other == found[0] for other in found)
    assert found[0].texts == {"a": [row[0] for row in rows], "b": [row[1] for row in rows]}
    assert found[0].labels == pytest.approx([row[2] / 5 for row in rows])


@pytest.mark.long
def test_rows_in_a_bucket_splits_in_one_file_and_labels_to_ignore(any_store: Store) -> None:
    rows = [
        {"a": "x", "b": "y", "gold": gold, "split": split}
        for gold, split in (("same", "train"), ("-", "train"), ("other", "train"), ("same", "dev"))
    ]
    any_store.put("nli.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    source = RowSource(
        files=("nli.jsonl",),
        texts=("a", "b"),
        label="gold",
        classes=("other", "same"),
        where={"split": "train"},
        ignore=("-",),
    )
    assert read_text_columns(source, any_store.uri).labels == [1, 0]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no number": (
        '{"a": "x", "b": "y", "score": NaN}\n',
        {},
        r"line 1: the score 'nan' is not a finite number",
    ),
    "a word": ('{"a": "x", "b": "y", "score": "high"}\n', {}, r"'high' is not a finite number from 0 to 5"),
    "outside": ('{"a": "x", "b": "y", "score": 5.5}\n', {}, r"the score '5.5' is not"),
    "an empty text": ('{"a": " ", "b": "y", "score": 1}\n', {}, r"line 1: the field 'a' is ' ', which is blank"),
    "empty": ("", {}, r"no row is selected"),
    "nothing left": ('{"a": "x", "b": "y", "score": 1}\n', {"where": {"a": "z"}}, r"no row is selected"),
    "another class": (
        '{"a": "x", "b": "y", "score": 1}\n',
        {"classes": ("0", "2")},
        r"label '1' is not one of 0, 2",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_mistakes_in_a_file_have_their_line(tmp_path: Path, what: str) -> None:
    text, changes, problem = BAD[what]
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(TaskError, match=problem) as error:
        read_text_columns(RowSource(files=("rows.jsonl",), **(PAIRS | changes)), str(tmp_path))
    assert error.value.remedy


def test_a_missing_file_and_a_form_of_no_kind(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"rows\.jsonl\b"):
        read_text_columns(RowSource(files=("rows.jsonl",), **PAIRS), str(tmp_path))
    with pytest.raises(TaskError, match=r"\bending\b"):
        read_text_columns(RowSource(files=("rows.xlsx",), **PAIRS), str(tmp_path))


def test_tasks_give_their_pairs(tmp_path: Path) -> None:
    write(tmp_path, [("x", "y", 4.0), ("z", "w", 0.0)], "tsv")
    task = tmp_path / "sts.yaml"
    task.write_text(
        "name: sts\nkind: similarity\npublished: here\nfiles: {train: rows.tsv}\nformat: tsv\n"
        "fields: {first: a, second: b, label: score}\nscore_range: [0, 4]\nmetrics: [spearman]\n"
    )
    rows = read_text_columns(RowSource(tasks=(str(task),)), str(tmp_path))
    assert rows.texts == {"first": ["x", "z"], "second": ["y", "w"]}
    assert rows.labels == [1.0, 0.0]


WRONG: dict[str, tuple[list[str], str]] = {
    "another key": (["learning_rate=1"], "learning_rate"),
    "no loss of that name": (["loss.kind=mse"], "loss"),
    "a string for a number": (["batch='16'"], "batch"),
    "softmax at several lengths": (["matryoshka=[8]"], "one width"),
    "tasks and files": (["train.files=[a.tsv]"], "either tasks or files"),
    "a prompt that is not there": (["train.prompts=[query, null]"], "no prompt query"),
    "one prompt for two texts": (["train.prompts=[null]"], "1 entries"),
    "batch of one": (["batch=1", "loss={kind: multiple_negatives}"], "no negatives"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_in_settings_have_their_path(what: str) -> None:
    assignments, problem = WRONG[what]
    with pytest.raises(RecipeError, match=problem) as error:
        load_settings("nli", assignments)
    assert error.value.remedy


def test_bundled_settings_read_glue_as_published(tmp_path: Path) -> None:
    for folder, name, rows in (
        ("MNLI", "gold_label", [("x", "y", "neutral"), ("x", "y", "-"), ("z", "w", "entailment")]),
        ("STS-B", "score", [("x", "y", "2.500"), ("z", "w", "5.0")]),
    ):
        (tmp_path / folder).mkdir()
        lines = ["\t".join(row) + "\n" for row in [("sentence1", "sentence2", name), *rows]]
        for split in ("train", "dev"):
            (tmp_path / folder / f"{split}.tsv").write_text("".join(lines))
    nli, sts, pairs = (load_settings(name, data=str(tmp_path)) for name in ("nli", "stsb", "pairs"))
    assert {nli.data_folder, sts.data_folder, pairs.data_folder} == {str(tmp_path)}
    assert {nli.lr, sts.lr, pairs.lr} == {2e-5}
    read = read_text_columns(nli.train, nli.data_folder)
    assert [read.classes[int(label)] for label in read.labels or []] == ["neutral", "entailment"]
    assert sts.dev is not None
    assert read_text_columns(sts.dev, sts.data_folder).labels == [0.5, 1.0]


def test_settings_of_a_file_look_for_data_beside_it(tmp_path: Path) -> None:
    write(tmp_path, [("x", "y", 5.0)], "csv")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "train: {files: [rows.csv], texts: [a, b], label: score, scores: [0, 5]}\nloss: {kind: cosent}\nlr: 1e-4\n"
    )
    training = load_settings(str(path), ["lr=3e-4"])
    assert training.lr == 3e-4
    assert read_text_columns(training.train, training.data_folder).labels == [1.0]
    with pytest.raises(RecipeError, match="bundled"):
        load_settings(str(tmp_path / "not-there.yaml"))
    assert open_store(tmp_path).size("mine.yaml")
