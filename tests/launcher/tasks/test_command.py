"""`maskfleet tasks list`, `show` and `check`, as people and programs use them."""

import json
import re
import sys
from pathlib import Path

import pytest
import task_folders
from typer.testing import CliRunner

from launcher import cli

README = Path(__file__).parents[3] / "launcher/README.md"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["tasks", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def promised(command: str) -> list[str]:
    """The keys in the command's line of the README."""
    (line,) = [line for line in README.read_text().splitlines() if line.startswith(f"| `{command}` ")]
    return re.findall("`(.*?)`", line.split("|")[2])


def test_list() -> None:
    text = run("list")
    assert re.search(r"^cola +classification +matthews, accuracy", text, re.MULTILINE)
    assert "glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte" in text
    records = {record["name"]: record for record in map(json.loads, run("list", "--json").splitlines())}
    assert all(list(record) == promised("tasks list") for record in records.values())
    assert (records["rte"]["after"], records["rte"]["suites"]) == ("mnli", ["glue"])


def test_show_prints_what_can_be_checked(tmp_path: Path) -> None:
    task_folders.glue(tmp_path)
    (tmp_path / "mine.yaml").write_text(run("show", "cola"))
    assert "no line of names" in run("show", str(tmp_path / "mine.yaml"))  # comments too
    assert "cola dev: 2 examples" in run("check", str(tmp_path / "mine.yaml"))
    assert run("show", "glue").startswith("name: glue\n")


def test_check_says_what_is_in_a_task(tmp_path: Path) -> None:
    task_folders.glue(tmp_path)
    text = run("check", "cola", "--data", str(tmp_path))
    assert "cola train: 2 examples, 1 50.0%, 0 50.0%; characters: median 27, longest 36; " in text
    assert "2 are in train, too" in text
    records = [
        json.loads(line) for line in run("check", "mnli", "--data", str(tmp_path), "--json").splitlines()
    ]
    assert [record["split"] for record in records] == ["train", "dev", "mismatched"]
    assert all(list(record) == promised("tasks check") for record in records)
    assert records[0]["repeated"] == 1


def test_check_of_a_suite_names_all_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_folders.glue(tmp_path)
    for name in ("RTE", "SST-2"):
        (tmp_path / name / "dev.tsv").unlink()
    monkeypatch.setattr(sys, "argv", ["maskfleet", "tasks", "check", "glue", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said, mistakes = capsys.readouterr()
    assert "mnli mismatched: 2 examples" in said  # the others are checked
    for name in ("RTE", "SST-2"):
        assert f"{tmp_path}/{name}/dev.tsv is not there" in mistakes
        assert f"({name}.zip)" in mistakes
    assert "Traceback" not in mistakes


def test_a_split_with_one_class_is_refused_where_the_metric_needs_two(tmp_path: Path) -> None:
    task_folders.glue(tmp_path)
    task_folders.write_tsv(tmp_path / "CoLA/dev.tsv", ("gj04", "1", "", "Fine."), ("gj04", "1", "", "Good."))
    result = CliRunner().invoke(cli.app, ["tasks", "check", "cola", "--data", str(tmp_path)])
    assert "every example of the split has the label '1', and matthews needs two" in str(result.exception)
