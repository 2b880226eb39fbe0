"""The command line: help that reads, errors without tracebacks, exit codes that schedulers rely on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.app.cli import main as cli
from launcher.app.cli.main import app
from launcher.exit_codes import REPEAT
from tests.support.checks.command import command_tree, exit_code, maskfleet
from tests.support.checks.silence import without_signs_of_life
from tests.support.data.made_up import write_text


def failing(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard error of `main`."""
    return exit_code(*arguments), capsys.readouterr().err


def test_every_command_and_option_explains_itself() -> None:
    for words, command in command_tree().items():
        assert command.help, words
        assert [option.name for option in command.params if not getattr(option, "help", None)] == [], words
    shown = maskfleet("launch", "slurm", "--help")
    assert "Usage:" in shown
    assert "--partition" in shown


def test_a_users_mistake_is_a_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = failing("train", tmp_path / "nowhere", capsys=capsys)
    assert code == 2
    assert re.search(r"error: .*\bno run\b", err)
    assert re.search(r"\bremedy: .*\bURI\b", err)
    assert "Traceback" not in err


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.runtime.recipe.source.bundled", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["maskfleet", "recipe", "list"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_damage_is_found_and_said(inputs: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(inputs / "corpus", tmp_path / "corpus")
    shard = next((tmp_path / "corpus" / "train").glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = CliRunner().invoke(app, ["corpus", "verify", str(tmp_path / "corpus")])
    assert result.exit_code == 1
    assert f"DAMAGED  train/{shard.name}" in result.output


@pytest.mark.long
def test_recipes_from_the_command_line(tmp_path: Path) -> None:
    assert "roberta-large-160gb" in maskfleet("recipe", "list")
    assert maskfleet("recipe", "show", "roberta-base", "--raw").startswith("# RoBERTa base")
    assert "124.7M parameters" in maskfleet("recipe", "check", "roberta-base")
    mine = tmp_path / "mine.yaml"
    mine.write_text(maskfleet("recipe", "show", "quickstart", "--set", "zero=2"))
    result = CliRunner().invoke(app, ["recipe", "diff", "quickstart", str(mine)])
    assert result.exit_code == 1
    assert result.output.splitlines() == ["operational (free):", "  - zero: 1 -> 2"]
    assert maskfleet("recipe", "diff", str(mine), str(mine)) == "the same\n"


def test_an_empty_input_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    code, err = failing("tokenizer", "train", tmp_path / "empty.txt", "--out", tmp_path / "t", capsys=capsys)
    assert code == 2
    assert " text" in err
    assert not (tmp_path / "t").exists()


def test_export_without_a_checkpoint_says_so(
    fresh_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = failing("checkpoints", "export", fresh_run, "--out", tmp_path / "model", capsys=capsys)
    assert code == 2
    assert re.search(r"\bno checkpoint\b", err)


@pytest.mark.long
def test_python_documentation_is_real_text(tmp_path: Path) -> None:
    from launcher.app.cli.demo_path import write_documentation

    documents, size = write_documentation(tmp_path / "python.jsonl")
    lines = [json.loads(line)["text"] for line in (tmp_path / "python.jsonl").read_text().splitlines()]
    assert documents == len(lines) == len(set(lines)) > 300
    assert 1_000_000 < size < 20_000_000
    assert os.environ.get("HOME", "/root") not in "".join(lines[:50])


@pytest.mark.long
def test_a_dead_endpoint_is_one_sentence_and_the_error() -> None:
    settings = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MASKFLEET_STORE_PATIENCE_S": "7",
    }
    command = [
        sys.executable,
        "-c",
        "from launcher.app.cli.main import main; main()",
        "show",
        "s3://b/runs/x",
        "--step",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert ended.returncode == REPEAT
    said = without_signs_of_life(ended.stderr).splitlines()
    assert " s3://b/runs/x/run.json: " in said[0]
    assert " 7 s " in said[0]
    assert [line.partition(":")[0] for line in said[1:]] == ["error", "remedy"]


def test_control_characters_of_a_corpus_are_shown_not_sent(tmp_path: Path) -> None:
    """A document's text may hold what clears a terminal or writes its title."""
    text = "A plain beginning. \x1b[2J\x1b]0;owned\x07 and \u202eback\u202c\x9b31m again. " * 30
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    write_text(tmp_path / "train.txt", 300)
    maskfleet("tokenizer", "train", tmp_path / "train.txt", "--vocab-size", "300", "--out", tmp_path / "t")
    maskfleet(
        *("corpus", "build", tmp_path / "in.jsonl", "--tokenizer", tmp_path / "t"),
        *("--out", tmp_path / "c", "--heldout", "0", "--workers", "1"),
    )
    shown = maskfleet("corpus", "show", tmp_path / "c")
    assert r"\x1b[2J\x1b]0;owned\x07 and \u202eback\u202c\x9b31m" in shown
    assert not any(character in shown for character in "\x1b\x07\x9b\u202e")
