"""An environment in which a command cannot work: the variable or the limit is named, with code 2, at once."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launcher.exit_codes import FINISHED, MISTAKE
from tests.support.runs import small_runs

KINDS = {"-n": resource.RLIMIT_NOFILE, "-v": resource.RLIMIT_AS, "-f": resource.RLIMIT_FSIZE}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    small_runs.prepare_corpus(folder)
    small_runs.new_run(folder, "run")
    (folder / "prepare.yaml").write_text(f"inputs: [{{source: one, files: [{folder / 'text.jsonl'}]}}]\nstages: []\n")
    return folder


def commands(inputs: Path, out: Path) -> dict[str, list[str]]:
    """Those that write temporary files, themselves or by Ray."""
    text, tokenizer = str(inputs / "text.jsonl"), str(inputs / "tokenizer")
    return {
        "train": ["train", str(inputs / "run")],
        "build": ["corpus", "build", text, "--tokenizer", tokenizer, "--out", str(out)],
        "prepare": ["corpus", "prepare", str(inputs / "prepare.yaml"), str(out)],
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
    arguments: list[str],
    prepare: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    found = subprocess.run(
        [sys.executable, "-m", "maskfleet", *arguments],
        env=os.environ | {"COLUMNS": "500"} | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=prepare,
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("train", "RAY_TMPDIR"),
        *((name, "TMPDIR") for name in ("train", "build", "prepare", "tokenizer", "demo")),
    ],
)
def test_a_folder_for_temporary_files_that_cannot_be_written(
    name: str, variable: str, inputs: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "a-file"
    blocked.touch()
    before = sorted(path for path in inputs.rglob("*"))
    code, said = run(commands(inputs, tmp_path / "out")[name], environment={variable: str(blocked)})
    assert code == MISTAKE, said
    assert f"{variable}={blocked}" in said
    assert "Traceback" not in said
    assert sorted(path for path in inputs.rglob("*")) == before, "no attempt is claimed"


@pytest.fixture(scope="module")
def large(inputs: Path) -> Path:
    """Text for more than one task, so that two workers need a Ray."""
    for number in range(2):
        (inputs / f"large{number}.jsonl").write_text((inputs / "text.jsonl").read_text() * 800)
    return inputs


def large_build(inputs: Path, out: Path, workers: int) -> list[str]:
    texts = [str(inputs / f"large{number}.jsonl") for number in range(2)]
    place = ["--tokenizer", str(inputs / "tokenizer"), "--out", str(out)]
    return ["corpus", "build", *texts, *place, "--workers", str(workers)]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "option", "limit"),
    [
        ("train", "-n", 64),
        ("train", "-v", 1 << 30),
        ("build", "-v", 1 << 30),
        ("build", "-f", 200 << 10),
    ],
)
def test_a_limit_that_is_too_low(name: str, option: str, limit: int, large: Path, tmp_path: Path) -> None:
    """And a low soft limit on open files, which may be raised, stops nobody."""
    arguments = commands(large, tmp_path / "out")["train"] if name == "train" else large_build(large, tmp_path / "o", 2)
    code, said = run(arguments, lambda: resource.setrlimit(KINDS[option], (limit, limit)))
    assert code == MISTAKE, said
    assert f"ulimit {option} " in said
    assert "Traceback" not in said


def test_a_completed_preparation_holds_no_remains_of_a_killed_one(inputs: Path, tmp_path: Path) -> None:
    arguments, out = commands(inputs, tmp_path / "out")["prepare"], tmp_path / "out"
    (out / "build/receipts").mkdir(parents=True)
    left = [out / "build/receipts/.tmp-killed", out / ".tmp-killed"]
    for path in left:
        path.write_bytes(b"half")
    assert run(arguments)[0] == FINISHED
    assert not [path for path in left if path.exists()]
    assert not (out / "build").exists()
