"""`maskfleet bench recipes` from end to end, at a budget too small to learn anything."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli.demo_text import write_jsonl
from launcher.cli.main import app

pytestmark = [pytest.mark.long, pytest.mark.cluster]

TASK = """
name: integers
kind: classification
published: nowhere
format: tsv
files: {train: train.tsv, dev: dev.tsv, test: test.tsv}
fields: {first: 1, label: 2}
labels: ["0", "1"]
metrics: [accuracy]
"""


def test_two_recipes_side_by_side(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "text.jsonl")
    for name in ("train", "dev", "test"):
        lines = [f"the value is {'an integer' if label else 'a string'}\t{label}" for label in (0, 1) * 20]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "task.yaml").write_text(TASK)
    arguments = ["bench", "recipes", tmp_path / "text.jsonl", "--task", tmp_path / "task.yaml"]
    arguments += ["--out", tmp_path / "out"]
    arguments += ["--recipe", "roberta-base", "--recipe", "electra-small", "--seeds", 2]
    arguments += ["--tokens", 8000, "--cpu-seconds", 1, "--vocabulary", 1024, "--processes", 1]

    first = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert first.exit_code == 0, first.output
    tables = [line for line in first.output.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in tables] == ["| recipe", "| roberta-base", "| electra-small"] * 2
    assert "majority" in tables[2]
    assert len(list((tmp_path / "out" / "results").iterdir())) == 8

    again = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert again.output.splitlines()[-11:] == first.output.splitlines()[-11:], "what is measured is read back"
