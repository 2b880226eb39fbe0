"""The same examples whatever file they are in; where files may lie; what a digest depends on."""

import csv
import gzip
import io
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.after.tasks.examples import Questions, Sentences, TaggedSentences, examples_digest
from launcher.after.tasks.read import to_bio
from launcher.after.tasks.task import Task, parse_task, task_digest
from launcher.errors import TaskError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\t\0"), max_size=12)
PLAIN = TEXT.filter(lambda text: bool(text.strip()))  # in a table without quotation marks, in a line of its own
ROWS = st.lists(st.tuples(PLAIN, PLAIN, st.sampled_from(["no", "yes"])), min_size=1, max_size=8)


def pairs(root: str | Path, form: str, **more: object) -> Task:
    """A task of pairs in `pairs.FORM`."""
    settings = {
        "name": "pairs",
        "kind": "pair_classification",
        "published": "nowhere",
        "files": {"train": f"pairs.{form}"},
        "format": form,
        "fields": {"first": "a", "second": "b", "label": "y"},
        "labels": ["no", "yes"],
        "metrics": ["accuracy"],
        **more,
    }
    return parse_task(json.dumps(settings), "pairs.yaml", str(root))


def spell(form: str, rows: list[tuple[str, str, str]]) -> bytes:
    """`rows` as a file of that form."""
    names = ("a", "b", "y")
    if form == "jsonl":
        return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows).encode()
    if form == "tsv":
        return "".join("\t".join(row) + "\n" for row in (names, *rows)).encode()
    if form == "csv":
        written = io.StringIO(newline="")
        csv.writer(written).writerows((names, *rows))
        return written.getvalue().encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)}), sink)
    return bytes(sink.getvalue().to_pybytes())


@settings(max_examples=15, deadline=None)
@given(ROWS)
def test_the_same_examples_in_every_format(rows: list[tuple[str, str, str]]) -> None:
    expected = Sentences(
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        np.array([row[2] == "yes" for row in rows], np.int64),
    )
    with tempfile.TemporaryDirectory() as folder:
        for form in ("jsonl", "tsv", "csv", "parquet"):
            Path(folder, f"pairs.{form}").write_bytes(spell(form, rows))
            assert examples_digest(pairs(folder, form).read("train")) == examples_digest(expected), form


ALPHABETS = {
    "latin-1": "aß äö",
    "GB18030": "a中文。🙂",
    "shift_jis": "aかナ漢表",  # a byte of the last is a backslash
    "utf-16-le": "aßĊ中",  # a byte of the third is a line feed
    "utf-16": "aßĊ中🙂",
    "utf-8-sig": "aß中",
}
MARKED = ("utf-16", "utf-8-sig")


@st.composite
def written_tables(draw: st.DrawFn) -> tuple[str, str, str, list[tuple[str, str]]]:
    """(form, encoding, delimiter, rows), the delimiter in none of the cells of plain tables."""
    encoding = draw(st.sampled_from(sorted(ALPHABETS)))
    cell = st.text(st.sampled_from(ALPHABETS[encoding]), min_size=1, max_size=9)
    form, delimiter = draw(st.sampled_from(["csv", "tsv"])), draw(st.sampled_from(",;\t|"))
    quoted = cell.map(lambda text: f'{text}{delimiter}"') if form == "csv" else cell
    return form, encoding, delimiter, draw(st.lists(st.tuples(quoted, cell), min_size=1, max_size=5))


@settings(max_examples=40, deadline=None)
@given(written_tables())
def test_the_same_examples_in_every_encoding_and_with_every_delimiter(
    written: tuple[str, str, str, list[tuple[str, str]]],
) -> None:
    form, encoding, delimiter, rows = written
    text = io.StringIO(newline="")
    table = csv.writer(
        text,
        delimiter=delimiter,
        quotechar='"' if form == "csv" else None,
        quoting=csv.QUOTE_MINIMAL if form == "csv" else csv.QUOTE_NONE,
    )
    table.writerows([("id", "a", "b", "y"), *((0, *row, "no") for row in rows)])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"pairs.{form}").write_bytes(text.getvalue().encode(encoding))
        declared = {} if encoding in MARKED else {"encoding": encoding}
        examples = pairs(folder, form, **declared, delimiter=delimiter).read("train")
        assert isinstance(examples, Sentences)
        assert examples.second is not None
        assert list(zip(examples.first, examples.second, strict=True)) == rows


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=5))
def test_quoted_cells_hold_anything_that_utf_8_can(cells: list[tuple[str, str]]) -> None:
    """Line ends are those of the file once they are read: csv's writer keeps them inside quotation marks."""
    rows = [tuple(cell.encode(errors="ignore").decode().replace("\r", "") for cell in row) for row in cells]
    written = io.StringIO(newline="")
    csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        [("a", "b", "y"), *((*row, "no") for row in rows)]
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pairs.csv").write_bytes(written.getvalue().encode())
        examples = pairs(folder, "csv").read("train")
        assert isinstance(examples, Sentences)
        assert examples.second is not None
        assert list(zip(examples.first, examples.second, strict=True)) == rows


def test_compressed_files_are_found_by_the_name_without_ending(tmp_path: Path) -> None:
    data = spell("jsonl", [("a", "b", "no")])
    found = []
    for packed, ending in ((gzip.compress(data), ".gz"), (zstandard.compress(data), ".zst"), (data, "")):
        folder = tmp_path / f"in{ending}"
        folder.mkdir()
        (folder / f"pairs.jsonl{ending}").write_bytes(packed)
        found.append(task_digest(pairs(folder, "jsonl")))
    assert len(set(found)) == 1


def test_a_digest_is_of_what_decides_a_result(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_bytes(spell("tsv", [("a", "b", "no"), ("c", "d", "yes")]))
    first = task_digest(pairs(tmp_path, "tsv"))
    same = pairs(tmp_path, "tsv", name="other", about="words", published="elsewhere", finetune={"lr": 1e-5})
    assert task_digest(same) == first
    for change in ({"metrics": ["matthews"]}, {"labels": ["yes", "no"]}, {"truncation": "only_first"}):
        assert task_digest(pairs(tmp_path, "tsv", **change)) != first
    (tmp_path / "pairs.tsv").write_bytes(spell("tsv", [("a", "b", "no"), ("c", "e", "yes")]))
    assert task_digest(pairs(tmp_path, "tsv")) != first  # the same name, other data


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=60), st.floats(0, 0.45), st.floats(0, 0.45), st.randoms())
def test_held_out_splits_are_disjoint_whole_and_do_not_depend_on_order(
    texts: list[str], dev: float, test: float, random: Any
) -> None:
    rows = [(f"x{text}", "b", "no") for text in texts]

    def divided(given: list[tuple[str, str, str]], folder: str) -> list[list[str]]:
        Path(folder, "pairs.jsonl").write_bytes(spell("jsonl", given))
        task = pairs(folder, "jsonl", held_out={"dev": dev, "test": test})
        found = []
        for split in task.splits:
            with suppress(TaskError):  # an empty split
                examples = task.read(split)
                assert isinstance(examples, Sentences)
                found.append(list(examples.first))
        return found

    with tempfile.TemporaryDirectory() as folder:
        first = divided(rows, folder)
        random.shuffle(rows)
        again = divided(rows, folder)
    assert sorted(text for split in first for text in split) == sorted(row[0] for row in rows)
    assert sum(len(set(split)) for split in first) == len({row[0] for row in rows})
    assert [sorted(split) for split in first] == [sorted(split) for split in again]


ENTITIES = st.lists(st.tuples(st.sampled_from(["PER", "LOC", "O"]), st.integers(1, 4)), max_size=8)


def spell_tags(entities: list[tuple[str, int]], scheme: str) -> list[str]:
    """Entities (or stretches of none) of so many words, one after another, in a scheme."""
    tags: list[str] = []
    for position, (kind, length) in enumerate(entities):
        if kind == "O":
            tags += ["O"] * length
        elif scheme == "bio":
            tags += [f"B-{kind}"] + [f"I-{kind}"] * (length - 1)
        elif scheme == "iob1":
            follows = position > 0 and entities[position - 1][0] == kind
            tags += [f"{'B' if follows else 'I'}-{kind}"] + [f"I-{kind}"] * (length - 1)
        elif length == 1:
            tags += [f"S-{kind}"]
        else:
            tags += [f"B-{kind}", *[f"I-{kind}"] * (length - 2), f"E-{kind}"]
    return tags


@given(ENTITIES)
def test_tags_of_every_scheme_become_bio(entities: list[tuple[str, int]]) -> None:
    expected = spell_tags(entities, "bio")
    assert to_bio(spell_tags(entities, "iob1"), "iob1") == expected
    assert to_bio(spell_tags(entities, "bioes"), "bioes") == expected
    assert to_bio(expected, "bio") == expected


def test_words_and_tags_in_lists(tmp_path: Path) -> None:
    """In Parquet; in JSON lines: test_bad_input.py."""
    records = {"tokens": [["New", "York"], ["rain"]], "ner": [[1, 2], [0]]}
    pq.write_table(pa.table(records), tmp_path / "t.parquet")
    task = parse_task(
        json.dumps(
            {
                "name": "t",
                "kind": "tagging",
                "published": "nowhere",
                "files": {"test": "t.parquet"},
                "format": "parquet",
                "fields": {"words": "tokens", "tags": "ner"},
                "labels": ["O", "B-LOC", "I-LOC"],
                "label_ids": True,
                "metrics": ["entity_f1"],
            }
        ),
        "t.yaml",
        str(tmp_path),
    )
    assert task.read("test") == TaggedSentences((("New", "York"), ("rain",)), ((1, 2), (0,)))


def test_questions_in_parquet_as_datasets_saves_squad(tmp_path: Path) -> None:
    answers = [{"text": ["b"], "answer_start": [2]}, {"text": [], "answer_start": []}]
    columns = {"id": ["1", "2"], "question": ["q", "r"], "context": ["a b", "c"], "answers": answers}
    pq.write_table(pa.table(columns), tmp_path / "dev.parquet")
    text = (
        "{name: q, kind: span, published: x, files: {dev: dev.parquet}, format: parquet, no_answer: true, "
        "fields: {id: id, question: question, context: context, answers: answers}, metrics: [answer_f1]}"
    )
    examples = parse_task(text, "q", str(tmp_path)).read("dev")
    assert isinstance(examples, Questions)
    assert [[answer.text for answer in accepted] for accepted in examples.answers] == [["b"], []]
