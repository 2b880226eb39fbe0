"""`maskfleet tasks list`, `show` and `check`, as people and programs use them."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.prepare.contamination import Decontaminate, make_decontamination_filter
from data_service.prepare.documents import Document, DropDecision
from launcher.app.cli import main as cli
from tests.support.checks.command import exit_code, maskfleet
from tests.support.checks.guide import promised
from tests.support.tasks import published_folders


def test_list_shows_tasks_and_suites_with_the_promised_keys() -> None:
    text = maskfleet("tasks", "list")
    assert re.search(r"^cola +classification +matthews, accuracy", text, re.MULTILINE)
    assert "glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte" in text
    records = {record["name"]: record for record in map(json.loads, maskfleet("tasks", "list", "--json").splitlines())}
    assert all(list(record) == promised("tasks list") for record in records.values())
    assert records["rte"]["suites"] == ["glue"]


def test_show_prints_what_can_be_checked(tmp_path: Path) -> None:
    published_folders.glue(tmp_path)
    (tmp_path / "mine.yaml").write_text(maskfleet("tasks", "show", "cola"))
    assert "names" in maskfleet("tasks", "show", str(tmp_path / "mine.yaml"))  # comments too
    assert "cola dev: 2 examples" in maskfleet("tasks", "check", str(tmp_path / "mine.yaml"))
    assert maskfleet("tasks", "show", "glue").startswith("name: glue\n")


def test_check_says_what_is_in_a_task(tmp_path: Path) -> None:
    published_folders.glue(tmp_path)
    text = maskfleet("tasks", "check", "cola", "--data", str(tmp_path))
    assert re.search(r"\bcola train: 2 examples, 1 50\.0%, 0 50\.0%; .*\b27\b.*\b36\b", text)
    assert re.search(r"\b2 .*\btrain, too\b", text)
    records = [
        json.loads(line) for line in maskfleet("tasks", "check", "mnli", "--data", str(tmp_path), "--json").splitlines()
    ]
    assert [record["split"] for record in records] == ["train", "dev", "mismatched"]
    assert all(list(record) == promised("tasks check") for record in records)
    assert records[0]["repeated"] == 1


def test_check_of_a_suite_names_all_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published_folders.glue(tmp_path)
    for name in ("RTE", "SST-2"):
        (tmp_path / name / "dev.tsv").unlink()
    assert exit_code("tasks", "check", "glue", "--data", tmp_path) == 2
    said, mistakes = capsys.readouterr()
    assert "mnli mismatched: 2 examples" in said  # the others are checked
    for name in ("RTE", "SST-2"):
        assert f"{tmp_path}/{name}/dev.tsv does not exist" in mistakes
        assert f"({name}.zip)" in mistakes
    assert "Traceback" not in mistakes


def test_a_split_with_one_class_is_refused_where_the_metric_needs_two(tmp_path: Path) -> None:
    published_folders.glue(tmp_path)
    published_folders.write_tsv(tmp_path / "CoLA/dev.tsv", ("gj04", "1", "", "Fine."), ("gj04", "1", "", "Good."))
    result = CliRunner().invoke(cli.app, ["tasks", "check", "cola", "--data", str(tmp_path)])
    assert re.search(r"\bsplit dev\b.*'1'.*\bmatthews\b", str(result.exception))


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("squad2", "squad2 dev: 2 examples, 1 of 2 without an answer; characters: median 66, longest 69"),
        ("squad", "squad dev: 1 examples, all have an answer"),
        ("conll2003", "conll2003 test: 2 examples, B-PER 33.3%, B-ORG 16.7%, O 16.7%"),
        ("scifact", "scifact test: 1 examples, 3 documents, 1.0 relevant to a query"),
        ("sts13", "sts13 test: 6 examples, 1.8 to 4, mean 2.90; characters: median 11, longest 13; 4 repeat"),
        ("trec", "trec test: 62 examples, NUM 96.8%, ENTY 1.6%, ABBR 1.6%"),
    ],
)
def test_check_knows_every_kind(task: str, line: str, tmp_path: Path) -> None:
    published_folders.everything(tmp_path)
    assert line in maskfleet("tasks", "check", task, "--data", str(tmp_path))


def test_a_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    published_folders.squad(tmp_path)
    (tmp_path / "dev-v1.1.json").unlink()
    (tmp_path / "dev-v1.1.json.gz").write_bytes(b"\x1f\x8b\x08 cut")
    result = CliRunner().invoke(cli.app, ["tasks", "check", "squad", "--data", str(tmp_path)])
    assert "squad train: 1 examples" in result.stdout
    assert re.search(r"\bdamaged\b.*\bgz data\b", str(result.exception))
    both = tmp_path / "both.yaml"
    both.write_text("name: both\ntasks: [squad, squad2]\n")
    result = CliRunner().invoke(cli.app, ["tasks", "check", str(both)])
    assert "squad2 dev: 2 examples" in result.stdout
    assert re.search(r"\bdamaged\b.*\bgz data\b", str(result.exception))


def test_ngrams_of_a_task_and_a_file_drop_what_holds_them(tmp_path: Path) -> None:
    """Texts of dev and not of train; by the stage that the printed hash belongs to."""
    sentences = {
        split: [" ".join(f"{split}{letter}{n}" for n in range(15)) for letter in "abc"] for split in ("train", "dev")
    }
    for split, its in sentences.items():
        rows = [(text, "1") for text in its]
        published_folders.write_tsv(tmp_path / f"SST-2/{split}.tsv", ("sentence", "label"), *rows)
    notes = " ".join(f"note{n}" for n in range(14))
    published_folders.write(tmp_path / "notes.txt", notes)
    out = tmp_path / "found.ngrams"
    files = ("--data", str(tmp_path), "--file", str(tmp_path / "notes.txt"), "--out", str(out))
    records = [json.loads(line) for line in maskfleet("tasks", "ngrams", "sst2", *files, "--json").splitlines()]
    assert all(list(record) == promised("tasks ngrams") for record in records)
    assert [(one["split"], one["texts"], one["looked_up"]) for one in records] == [
        ("sst2/dev", 3, 3),
        (str(tmp_path / "notes.txt"), 1, 1),
    ]
    assert {one["sha256"] for one in records} == {hashlib.sha256(out.read_bytes()).hexdigest()}
    stage = Decontaminate(stage="decontaminate", index=str(out), sha256=records[0]["sha256"])
    decide = make_decontamination_filter(stage)
    for text, reason in (
        (sentences["dev"][1], "sst2/dev"),
        (notes, str(tmp_path / "notes.txt")),
        (sentences["train"][1], None),
    ):
        found = decide(Document("1", f"before {text} after", "web"))
        assert (found.reason if isinstance(found, DropDecision) else None) == reason
    assert records[0]["sha256"] in maskfleet("tasks", "ngrams", "sst2", *files)
