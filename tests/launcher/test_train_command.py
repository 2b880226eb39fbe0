"""The commands of a run's life through real processes: published recipes, shrunk, from init to export."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def maskfleet(*arguments: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-c", "from launcher.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("recipe", ["roberta-base", "roberta-large-160gb"])
def test_a_published_recipe_runs_on_a_cpu(recipe: str, inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    corpus = f"{{uri: '{inputs / 'corpus'}', weight: 1}}"
    settings = (
        f"corpus.sources={{a: {corpus}, b: {corpus}}}",
        f"tokenizer.uri={inputs / 'tokenizer'}",
        "corpus.heldout.fraction=0.1",
        "phases.0.length=32",
        "phases.0.steps=4",
    )
    maskfleet("init", recipe, run, "--tiny", *(part for setting in settings for part in ("--set", setting)))
    assert "step 4 of 4" in maskfleet("train", run)
    assert "good" in maskfleet("checkpoints", "verify", run)
    assert "exported step 4" in maskfleet("checkpoints", "export", run, "--out", tmp_path / "model")
    maskfleet("report", run, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "finished" in page
    assert "below the unigram" in page or "above the unigram" in page
    assert "step 4 of 4" in maskfleet("train", run), "a finished run is recognised"
    maskfleet("train", run, "--set", "seed=9", code=2)
