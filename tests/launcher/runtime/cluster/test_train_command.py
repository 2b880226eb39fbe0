"""A finished run that is trained again. Training in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_a_finished_run_is_recognised(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    maskfleet("init", "quickstart", run, "--tiny", *settings(inputs))
    assert "step 4 of 4" in train(run)
    weights = sorted((run / "checkpoints").rglob("*.safetensors"))
    assert "step 4 of 4" in train(run)
    assert sorted((run / "checkpoints").rglob("*.safetensors")) == weights
