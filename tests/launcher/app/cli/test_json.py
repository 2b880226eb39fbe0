"""`--json`: the keys that infra/docs/records.md promises to programs, and nothing else on standard output."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints.attempt import claim
from data_service.store.open import open_store
from launcher.app.cli import main as cli
from launcher.app.cli.main import app
from launcher.runtime.recipe.source import recipe_text
from tests.support.checks.guide import keys, promised
from tests.support.ranks.checkpointing import commit_steps


def records(*arguments: str | Path) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(isinstance(record, dict) for record in found)
    return found


def test_recipe_list_has_the_promised_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    text = recipe_text("roberta-large")
    monkeypatch.setattr("launcher.runtime.recipe.source.bundled", lambda: {"roberta-large": text})
    found = records("recipe", "list")
    assert keys(found) == promised("recipe list")
    (large,) = found
    assert (large["layers"], large["hidden"], large["discriminator_parameters"]) == (24, 1024, None)


def test_a_timeline_has_the_promised_keys() -> None:
    first, *others = found = records("recipe", "show", "modernbert-base", "--timeline")
    assert keys(found) == promised("recipe show --timeline")
    assert (first["phase"], first["first"], first["unit"], first["curve"]) == (0, 0, "rows", "warmup")
    assert [record["first"] for record in others] == [record["last"] + 1 for record in found[:-1]]  # type: ignore[operator]


def test_checkpoints_list_and_verify_have_the_promised_keys(fresh_run: str) -> None:
    store = open_store(fresh_run)
    commit_steps(store, claim(store), 3, 6)
    found = records("checkpoints", "list", fresh_run)
    assert keys(found) == promised("checkpoints list")
    assert [record["step"] for record in found] == [6, 3]
    verified = records("checkpoints", "verify", fresh_run)
    assert keys(verified) == promised("checkpoints verify")
    assert [record["problems"] for record in verified] == [[], []]


def test_a_corpus_and_a_tokenizer(inputs: Path) -> None:
    (found,) = records("corpus", "stats", inputs / "corpus")
    assert set(promised("corpus stats")) <= found.keys()
    assert isinstance(found["train"], dict)
    assert found["train"].keys() == {"blocks", "documents", "sentences", "tokens", "text_bytes"}
    assert keys(records("corpus", "verify", inputs / "corpus")) == promised("corpus verify")
    (checked,) = records("tokenizer", "check", inputs / "tokenizer", inputs / "text.jsonl")
    assert list(checked) == promised("tokenizer check")
    assert checked["exact"] == 1


@pytest.mark.long
@pytest.mark.parametrize("command", ["doctor", "preflight"])
def test_doctor_and_preflight_have_the_promised_keys(command: str) -> None:
    found = records(command)
    assert keys(found) == promised("doctor, preflight")
    assert {record["verdict"] for record in found} <= {"ok", "warning", "failure"}


def test_runs_status_and_estimate(fresh_run: str) -> None:
    (status,) = records("runs", "status", fresh_run)
    assert list(status) == promised("runs status")
    asked = ("bert-tiny", "--nodes", "1", "--gpus-per-node", "8", "--gpu", "H100", "--json")
    estimate = CliRunner().invoke(app, ["estimate", *asked], catch_exceptions=False).stdout
    assert list(json.loads(estimate)) == promised("estimate")


def test_a_mistake_leaves_standard_output_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["maskfleet", "corpus", "stats", str(tmp_path / "none"), "--json"])
        with pytest.raises(SystemExit):
            cli.main()
    said = capsys.readouterr()
    assert not said.out
    assert "error:" in said.err
