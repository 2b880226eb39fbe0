"""An environment in which a command cannot work: the variable or the limit is named, with code 2, at once."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launcher.exit_codes import FINISHED, MISTAKE, REPEAT
from tests.support.runs import small_runs
from tests.support.runs.observer import title

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
    arguments = (
        commands(large, tmp_path / "out")["train"]
        if name == "train"
        else large_build(large, tmp_path / "o", 2)
    )
    code, said = run(arguments, lambda: resource.setrlimit(KINDS[option], (limit, limit)))
    assert code == MISTAKE, said
    assert f"ulimit {option} " in said
    assert "Traceback" not in said


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["/raylet/raylet ", "/gcs_server "])
def test_a_build_whose_ray_dies_is_to_be_repeated(kind: str, large: Path, tmp_path: Path) -> None:
    """One line of an error and one of a remedy; then the same bytes as from one process, and nothing left."""
    arguments, temporary = large_build(large, tmp_path / "corpus", 2), Path(tempfile.mkdtemp(dir="/tmp"))
    environment = os.environ | {"TMPDIR": str(temporary), "COLUMNS": "500"}
    command = [sys.executable, "-m", "maskfleet", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (victims := [one for one in descendants(process) if kind in title(one)]):
        assert process.poll() is None, "before it was struck"
    victims[0].kill()
    out, errors = process.communicate(timeout=200)
    assert process.returncode == REPEAT, errors
    assert "Traceback" not in out + errors
    assert "remedy: " in errors
    assert "state-dump" not in out + errors
    assert run(arguments, environment={"TMPDIR": str(temporary)})[0] == FINISHED
    assert run(large_build(large, tmp_path / "alone", 1))[0] == FINISHED
    built, alone = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in (tmp_path / "corpus", tmp_path / "alone")
    )
    assert built == alone
    assert not list(temporary.glob("ray/session_2*"))
    shutil.rmtree(temporary)


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def test_a_completed_preparation_holds_no_remains_of_a_killed_one(inputs: Path, tmp_path: Path) -> None:
    arguments, out = commands(inputs, tmp_path / "out")["prepare"], tmp_path / "out"
    (out / "build/receipts").mkdir(parents=True)
    left = [out / "build/receipts/.tmp-killed", out / ".tmp-killed"]
    for path in left:
        path.write_bytes(b"half")
    assert run(arguments)[0] == FINISHED
    assert not [path for path in left if path.exists()]
    assert not (out / "build").exists()
