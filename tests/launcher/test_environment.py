"""An environment in which a command cannot work: the variable or the limit is named, with code 2, at once."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.contract import MISTAKE
from tests.support.runs import small_runs

KINDS = {"-n": resource.RLIMIT_NOFILE, "-v": resource.RLIMIT_AS, "-f": resource.RLIMIT_FSIZE}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    small_runs.prepare_corpus(folder)
    small_runs.new_run(folder, "run")
    (folder / "prepare.yaml").write_text(
        f"inputs: [{{source: one, files: [{folder / 'text.jsonl'}]}}]\nstages: []\n"
    )
    return folder


def commands(inputs: Path, out: Path) -> dict[str, list[str]]:
    """Those that write temporary files, themselves or by Ray."""
    text, tokenizer = str(inputs / "text.jsonl"), str(inputs / "tokenizer")
    return {
        "train": ["train", str(inputs / "run")],
        "build": ["corpus", "build", text, "--tokenizer", tokenizer, "--out", str(out)],
        "prepare": ["corpus", "prepare", str(inputs / "prepare.yaml"), str(out)],
        "merge": ["corpus", "merge", str(inputs / "corpus"), str(inputs / "corpus"), "--out", str(out)],
        "tokenizer": [
            "tokenizer",
            "train",
            text,
            "--kind",
            "wordpiece",
            "--vocab-size",
            "300",
            "--out",
            str(out),
        ],
        "demo": ["demo", "--out", str(out)],
    }


def run(
    arguments: list[str], prepare: Callable[[], None] | None = None, **environment: str
) -> tuple[int, str]:
    found = subprocess.run(
        [sys.executable, "-m", "maskfleet", *arguments],
        env=os.environ | {"COLUMNS": "500"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=prepare,
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("name", ["train", "build", "prepare", "tokenizer", "demo"])
def test_a_folder_for_temporary_files_that_cannot_be_written(
    name: str, variable: str, inputs: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "a-file"
    blocked.touch()
    before = sorted(path for path in inputs.rglob("*"))
    code, said = run(commands(inputs, tmp_path / "out")[name], **{variable: str(blocked)})
    assert code == MISTAKE, said
    assert f"{variable}={blocked}" in said
    assert "Traceback" not in said
    assert sorted(path for path in inputs.rglob("*")) == before, "no attempt is claimed"


@pytest.mark.parametrize(("option", "limit"), [("-n", 64), ("-v", 1 << 30), ("-f", 200 << 10)])
@pytest.mark.parametrize("name", ["train", "build"])
def test_a_limit_that_is_too_low(name: str, option: str, limit: int, inputs: Path, tmp_path: Path) -> None:
    arguments = commands(inputs, tmp_path / "out")[name]
    if name == "build":  # more than one task, so that it needs a Ray
        arguments += ["--workers", "2", *[str(inputs / "text.jsonl")] * 0]
        for number in range(2):
            (tmp_path / f"{number}.jsonl").write_text((inputs / "text.jsonl").read_text() * 120)
        arguments[2] = str(tmp_path / "*.jsonl")
    code, said = run(arguments, lambda: resource.setrlimit(KINDS[option], (limit, limit)))
    assert code == MISTAKE, said
    assert f"ulimit {option} " in said
    assert "Traceback" not in said
