"""The mean of checkpoints' weights, and the average that a run keeps, exported: NumPy's values, and what starts from
them."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from checkpoints.attempt import claim
from checkpoints.gather import SingleRank
from checkpoints.hf.load import load_pretrained
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import list_committed
from checkpoints.load import CheckpointReader
from checkpoints.save import Saver
from data_service.store.base import digest
from encoder_core.train.zero_state import Fragment
from launcher.after.export.export import export_run
from launcher.app.cli.main import app
from launcher.errors import RunError
from launcher.runtime.rank.build import build_model
from launcher.runtime.rank.initial_weights import initial_weights
from launcher.runtime.run.log import RunLog, evaluation_record
from launcher.runtime.run.record import Run, open_run, select_checkpoint
from tests.support.checks.command import maskfleet
from tests.support.models.parity import random_weights
from tests.support.runs.untrained import Committing

STEPS = (3, 5, 8, 9, 12)


def stored(run: Run, manifest: CheckpointManifest, kind: str = "master") -> dict[str, np.ndarray]:
    with CheckpointReader(run.store, manifest) as reader:
        return {name: reader.read_full(name, kind).numpy() for name in manifest.shapes}


def mean(run: Run, steps: list[int]) -> dict[str, np.ndarray]:
    weights = [stored(run, select_checkpoint(run, step)) for step in steps]
    return {
        name: np.asarray(np.mean([each[name] for each in weights], axis=0, dtype=np.float64)).astype(np.float32)
        for name in weights[0]
    }


def exported(folder: Path) -> dict[str, Tensor]:
    return load_pretrained(folder, "mlm").tensors


def ensure_equal(found: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].numpy(), values), name


@pytest.fixture
def run(fresh_run: str) -> Run:
    committing = Committing(fresh_run)
    for step in STEPS:
        committing.commit(step)
    return open_run(fresh_run)


def test_any_steps_of_a_run_become_their_mean_which_a_run_starts_from(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    steps = sorted(random.Random(1).sample(STEPS, 3))
    said = maskfleet("checkpoints", "average", run.uri, "--steps", ",".join(map(str, reversed(steps))), "--out", out)
    assert all(str(step) in said for step in steps)
    expected = mean(run, steps)
    ensure_equal(exported(tmp_path / "out"), expected)
    start = replace(run, recipe=run.recipe.model_copy(update={"start": out}))
    begin = initial_weights(start, run.tokenizer(), build_model(run.recipe, run.tokenizer()), SingleRank())
    assert begin is not None
    for name, values in expected.items():
        assert np.array_equal(begin.read(name, "master", 0, values.size).numpy(), values.ravel()), name
    named = json.loads((tmp_path / "out/mean.json").read_text())
    assert (named["run"], named["fingerprint"]) == (run.uri, run.record.fingerprint)
    marks = {mark.step: mark for mark in list_committed(run.store)}
    assert named["checkpoints"] == [
        {"step": step, "attempt": 1, "manifest": digest(run.store.get(marks[step].manifest_key))} for step in steps
    ]


def test_the_newest_ones_of_the_present_history(run: Run, tmp_path: Path) -> None:
    maskfleet("checkpoints", "average", run.uri, "--last", "2", "--out", str(tmp_path / "out"))
    ensure_equal(exported(tmp_path / "out"), mean(run, list(STEPS[-2:])))
    card = (tmp_path / "out/README.md").read_text()
    assert "mean of those after steps 9, 12" in card
    assert "none on record" in card


def test_what_cannot_be_averaged_is_refused(run: Run, tmp_path: Path) -> None:
    for words in (
        "",
        "--last 2 --steps 3,5",
        "--last 1",
        "--last 6",
        "--steps 3",
        "--steps 3,4",
        "--steps 3;5",
    ):
        command = ["checkpoints", "average", run.uri, *words.split(), "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, RunError) or result.exit_code == 2, words
        assert not (tmp_path / "out").exists()


def test_the_average_that_a_run_keeps(fresh_run: str, tmp_path: Path) -> None:
    run = open_run(fresh_run)
    weights, average = (random_weights(build_model(run.recipe, run.tokenizer()), seed=seed) for seed in (1, 2))
    saver = Saver(run.store, claim(run.store), SingleRank())
    of = dict(average.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in of.items()}
    saver.begin(
        5,
        [
            Fragment(name, 0, {"master": p.detach().flatten(), "average": of[name].detach().flatten()})
            for name, p in weights.named_parameters()
        ],
        shapes,
        {},
    )
    saver.wait_for_all(lambda sent: None)
    saver.commit()
    saver.close()
    journal = RunLog(run.store, 1, 1000.0, lambda line: None)
    journal.add_metrics(evaluation_record(4, {"loss": 4.0, "mlm_loss": 4.0, "average_mlm_loss": 3.5}))
    journal.close()
    maskfleet("checkpoints", "export", run.uri, "--average", "--out", str(tmp_path / "average"))
    export_run(run, None, str(tmp_path / "weights"))
    for folder, module in (("average", average), ("weights", weights)):
        for name, values in exported(tmp_path / folder).items():
            assert torch.equal(values, dict(module.named_parameters())[name]), name
    card = (tmp_path / "average/README.md").read_text()
    assert "exponential moving average" in card
    assert "mlm 3.500" in card
    assert "4.000" not in card.split("## Recipe")[0]


def test_a_run_without_an_average_says_how_to_get_one(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        export_run(run, None, str(tmp_path / "out"), average=True)
    assert "average.ema" in refused.value.remedy
