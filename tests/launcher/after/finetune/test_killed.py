"""A fine-tuning that is killed, asked to end, or left without its store: nothing is half-written or lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.store.open import open_store
from launcher.after.finetune import loop
from launcher.after.finetune.export import RESULTS
from launcher.after.finetune.pretrained import LocalModel, folder_digest, open_pretrained
from launcher.after.finetune.resume import Scratch
from launcher.after.finetune.settings import FinetuneSettings
from launcher.after.finetune.tries import try_each
from launcher.app.cli.main import app
from launcher.contract import REPEAT
from tests.support.checks.command import exit_code
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


@pytest.mark.long
def test_a_store_that_does_not_answer_at_the_end_loses_no_model(
    models: Models,
    s3: S3Server,
    faults: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    task("classification", tmp_path)
    (tmp_path / "task.yaml").write_text(description("classification") + "finetune: {epochs: 1, batch: 16}\n")
    faults.only, faults.always = lambda method, path: method in ("PUT", "POST"), "error 500"
    uri = f"s3://{s3.new_bucket()}/out"
    command = ["finetune", str(models("bert").folder), str(tmp_path / "task.yaml"), "--threads", "1"]
    assert exit_code(*command, "--out", uri) == REPEAT
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (kept,) = (tmp_path / "temporary").glob("maskfleet-finetuned-*")
    assert f" {kept}" in said
    faults.always = None
    again = CliRunner().invoke(app, [*command, "--out", uri], catch_exceptions=False)
    assert again.exit_code == 0
    assert digest_at(uri) == folder_digest(kept)


@pytest.mark.parametrize("draw", [0, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(1, 8))])
def test_what_was_ended_goes_on_to_the_same_bits(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: int
) -> None:
    """Ended after random updates, again and again; checkpoints are at ends of epochs, or after all updates."""
    draws, asked = random.Random(draw), task("classification", tmp_path)
    choices = [FEW.model_copy(update={"lr": lr, "epochs": 3, "patience": 2}) for lr in (1e-3, 2e-3)]
    list(try_each(models("bert"), asked, choices, 5, str(tmp_path / "undisturbed")))
    monkeypatch.setattr("launcher.after.finetune.run._SAVE_S", draws.choice([0.0, 1e9]))
    made, original = Counter[str](), loop._update

    def update(*arguments: object, **named: object) -> float:
        made["now"] += 1
        if made["now"] > made["most"]:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "_update", update)
    out, scratch = str(tmp_path / "out"), tmp_path / "scratch"
    for _ in range(100):
        made["now"], made["most"] = 0, draws.randint(4, 12)  # an epoch is 4 updates
        with suppress(KeyboardInterrupt):
            list(try_each(models("bert"), asked, choices, 5, out, scratch))
            break
        assert scratch.exists()
        assert not Path(out).exists()
    assert folder_digest(Path(out)) == folder_digest(tmp_path / "undisturbed")
    told = [json.loads((tmp_path / folder / RESULTS).read_bytes()) for folder in ("out", "undisturbed")]
    assert told[0] == told[1]
    assert not scratch.exists()


def _command(models: Models, place: Path, epochs: int) -> list[str]:
    task("classification", place)
    (place / "task.yaml").write_text(description("classification") + f"finetune: {{epochs: {epochs}}}\n")
    command = [sys.executable, "-m", "maskfleet", "finetune", str(models("bert").folder)]
    return [*command, str(place / "task.yaml"), "--out", str(place / "out"), "--threads", "1"]


@pytest.mark.long
def test_asked_to_end_it_keeps_what_is_finished(models: Models, tmp_path: Path) -> None:
    """SIGTERM after the second epoch of very many."""
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        _command(models, tmp_path, 100_000),
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = next(line for line in process.stderr if "epoch 2 of" in line)
    process.terminate()
    rest = process.stderr.read()
    assert process.wait() == REPEAT
    assert "Traceback" not in said + rest
    assert str(tmp_path / "out.unfinished") in rest
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "out").exists()
    kept = Scratch(tmp_path / "out.unfinished/0/this", kept=True).newest()
    assert kept is not None
    assert len(json.loads((kept / "state.json").read_bytes())["curves"]) >= 1


@pytest.mark.long
def test_asked_to_end_at_any_moment_it_goes_on(models: Models, tmp_path: Path) -> None:
    """By SIGTERM, some seconds after each start; the model is the one of an undisturbed fine-tuning."""
    draws = random.Random(11)
    (tmp_path / "calm").mkdir()
    (tmp_path / "ended").mkdir()
    began = time.monotonic()
    subprocess.run(_command(models, tmp_path / "calm", 60), check=True)
    usual, ends = time.monotonic() - began, 0
    for _ in range(50):
        process = subprocess.Popen(_command(models, tmp_path / "ended", 60))
        with suppress(subprocess.TimeoutExpired):
            process.wait(draws.uniform(0, 1.2 * usual))
        process.terminate()
        code = process.wait()
        if code == 0:
            break
        ends += 1
        assert code in (REPEAT, 128 + signal.SIGTERM, -signal.SIGTERM)  # the others: before it had begun
        assert not (tmp_path / "ended/out").exists()
    assert ends
    assert folder_digest(tmp_path / "ended/out") == folder_digest(tmp_path / "calm/out")
    assert not (tmp_path / "ended/out.unfinished").exists()
