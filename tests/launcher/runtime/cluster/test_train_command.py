"""The commands of a run's life: published recipes, shrunk, from init to export. Training in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import RunChanged
from tests.support.checks.command import maskfleet

pytestmark = pytest.mark.cluster


def train(run: Path) -> str:
    command = [sys.executable, "-c", "from launcher.app.cli.main import main; main()", "train", str(run)]
    environment = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def settings(inputs: Path) -> list[str]:
    """The shared corpus twice, as a mixture of two sources."""
    corpus = f"{{uri: '{inputs / 'corpus'}', weight: 1}}"
    values = (
        f"corpus.sources={{a: {corpus}, b: {corpus}}}",
        f"tokenizer.uri={inputs / 'tokenizer'}",
        "corpus.heldout.fraction=0.1",
        "phases.0.steps=4",
        "schedule.warmup=1",
        "evaluation={every: {steps: 2}, samples: 32}",
    )
    return [part for value in values for part in ("--set", value)]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["roberta-base", "roberta-large-160gb"])
def test_a_published_recipe_runs_on_a_cpu(recipe: str, inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    maskfleet("init", recipe, run, "--tiny", *settings(inputs))
    assert "step 4 of 4" in train(run)
    assert "good" in maskfleet("checkpoints", "verify", run)
    assert "exported step 4" in maskfleet("checkpoints", "export", run, "--out", tmp_path / "model")
    maskfleet("report", run, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "finished" in page
    assert "unigram" in page
    with pytest.raises(RunChanged, match="- seed: 1 -> 9"):
        maskfleet("train", run, "--set", "seed=9")


@pytest.mark.long
def test_a_finished_run_is_recognised(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    maskfleet("init", "quickstart", run, "--tiny", *settings(inputs))
    assert "step 4 of 4" in train(run)
    weights = sorted((run / "checkpoints").rglob("*.safetensors"))
    assert "step 4 of 4" in train(run)
    assert sorted((run / "checkpoints").rglob("*.safetensors")) == weights
