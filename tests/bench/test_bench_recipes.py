"""`tests/bench/recipes.py` from end to end, at a budget too small to learn anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.app.cli.demo_path import write_jsonl

pytestmark = [pytest.mark.long, pytest.mark.cluster]

PROGRAM = Path(__file__).parent / "recipes.py"
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
    arguments = [tmp_path / "text.jsonl", "--task", tmp_path / "task.yaml", "--out", tmp_path / "out"]
    arguments += ["--recipe", "roberta-base", "--recipe", "electra-small", "--seeds", 2]
    arguments += ["--tokens", 8000, "--cpu-seconds", 1, "--vocabulary", 1024, "--processes", 1]

    first = measured(*arguments)
    tables = [line for line in first if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in tables] == ["| recipe", "| roberta-base", "| electra-small"] * 2
    assert "majority" in tables[2]
    assert len(list((tmp_path / "out" / "results").iterdir())) == 8
    assert measured(*arguments) == first, "what is measured is read back"


def measured(*arguments: object) -> list[str]:
    """Lines that the program prints."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=PROGRAM.parents[2])
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
