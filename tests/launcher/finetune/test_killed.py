"""A fine-tuning that is killed, asked to end, or left without its store: nothing is half-written or lost."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.store.open import open_store
from launcher.cli.main import app
from launcher.contract import REPEAT
from launcher.finetune.export import RESULTS
from launcher.finetune.pretrained import LocalModel, folder_digest, open_pretrained
from launcher.finetune.settings import FinetuneSettings
from launcher.finetune.tries import try_each
from tests.support.ranks.forked import forked
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server
from tests.support.tasks.small_tasks import Models, description, task

FEW = FinetuneSettings(lr=1e-3, epochs=1, batch=16)


def _finetuned(source: str, folder: str, data: str, out: str) -> None:
    given = LocalModel(source, None, Path(folder), "")
    list(try_each(given, task("classification", Path(data)), [FEW], 5, out))


def digest_at(uri: str) -> str:
    with open_pretrained(uri) as found:
        return found.digest


@pytest.mark.parametrize("draw", [1, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(2, 12))])
def test_killed_at_any_request_to_the_store(
    models: Models, s3: S3Server, faults: FaultProxy, tmp_path: Path, draw: int
) -> None:
    """By SIGKILL when a request arrives, one of the first twenty. What it leaves is no model, or all of it; a former
    model is there whole, or it is gone."""
    given, uri = models("bert"), f"s3://{s3.new_bucket()}/out"
    arguments = (given.source, str(given.folder), str(tmp_path))
    _finetuned(*arguments, str(tmp_path / "here"))
    expected, after = folder_digest(tmp_path / "here"), random.Random(draw).randint(1, 20)
    if draw % 2:
        _finetuned(*arguments, uri)
    process = forked(_finetuned, *arguments, uri)
    came: list[str] = []

    def struck(method: str, path: str) -> bool:
        came.append(method)
        if len(came) == after:
            process.kill()
        return False

    faults.only = struck
    process.start()
    process.join()
    faults.only = lambda method, path: False
    assert process.exitcode == (-signal.SIGKILL if len(came) >= after else 0)
    if open_store(uri).size("config.json") is not None:
        assert digest_at(uri) == expected
    _finetuned(*arguments, uri)
    assert digest_at(uri) == expected
    assert {entry.key for entry in open_store(uri).list()} >= {RESULTS, "config.json", "model.safetensors"}


def test_a_store_that_does_not_answer_at_the_end_loses_no_model(
    models: Models, s3: S3Server, faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    task("classification", tmp_path)
    (tmp_path / "task.yaml").write_text(description("classification") + "finetune: {epochs: 1, batch: 16}\n")
    faults.only, faults.always = lambda method, path: method in ("PUT", "POST"), "error 500"
    uri = f"s3://{s3.new_bucket()}/out"
    command = ["finetune", str(models("bert").folder), str(tmp_path / "task.yaml"), "--threads", "1"]
    result = CliRunner().invoke(app, [*command, "--out", uri])
    assert result.exit_code == REPEAT, result.output
    assert "Traceback" not in result.output
    (kept,) = (tmp_path / "temporary").iterdir()
    assert f"the model is kept in {kept}" in result.stderr
    faults.always = None
    again = CliRunner().invoke(app, [*command, "--out", uri], catch_exceptions=False)
    assert again.exit_code == 0
    assert digest_at(uri) == folder_digest(kept)


def test_asked_to_end_it_leaves_nothing_behind(models: Models, tmp_path: Path) -> None:
    """SIGTERM after the first epoch of very many."""
    task("classification", tmp_path)
    (tmp_path / "task.yaml").write_text(description("classification") + "finetune: {epochs: 100000}\n")
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "maskfleet", "finetune", str(models("bert").folder)]
    process = subprocess.Popen(
        [*command, str(tmp_path / "task.yaml"), "--out", str(tmp_path / "out"), "--threads", "1"],
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = next(line for line in process.stderr if "epoch 1 of" in line)
    process.terminate()
    rest = process.stderr.read()
    assert process.wait() == REPEAT
    assert "Traceback" not in said + rest
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "out").exists()
