"""A real run: `maskfleet train` is killed in the middle, and resumes to the bits of an undisturbed run."""

import json
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from checkpoints.listing import list_committed, read_manifest
from data_service.store.open import open_store
from tests.gpu.machine import GPU, finish

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(1200),
]
_STEPS, _SAVES, _ROWS, _LENGTH = 60, 10, 32, 32
_POLL_S, _LIMIT_S = 0.2, 500.0
_SETTINGS = (
    f"phases=[{{steps: {_STEPS}, length: {_LENGTH}, batch: {{sequences: {_ROWS}}}}}]",
    f"schedule.warmup={_SAVES}",
    f"microbatch={_ROWS // 2}",
    f"trainers={1 if GPU else 2}",
    "precision=bf16",
    "deterministic=true",
    f"checkpoint={{every: {{steps: {_SAVES}}}, keep_last: 2}}",
    f"evaluation={{every: {{steps: {_STEPS}}}, samples: 1}}",
    "logging.tensorboard=false",
)


def command(*arguments: object, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "maskfleet", *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TRITON_INTERPRET": "0"},
        )


def complete(*arguments: object, log: Path) -> None:
    finish([command(*arguments, log=log)], log, _LIMIT_S)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draws = tmp_path_factory.mktemp("corpus"), random.Random(1)
    words = ["".join(draws.choices("abcdefghij", k=draws.randrange(2, 8))) for _ in range(500)]
    texts = (" ".join(draws.choices(words, k=120)) for _ in range(1500))
    text, log = folder / "text.jsonl", folder / "log"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    size = ("--kind", "byte_bpe", "--vocab-size", 1000)
    complete("tokenizer", "train", text, *size, "--out", folder / "tokenizer", log=log)
    built = ("--tokenizer", folder / "tokenizer", "--workers", 1, "--heldout", 0.05)
    complete("corpus", "build", text, *built, "--out", folder / "corpus", log=log)
    return folder / "corpus"


def kill_after_a_commit(uri: Path, log: Path) -> int:
    """Kill training after a commit, and return the newest commit's step."""
    process, end = command("train", uri, log=log), time.monotonic() + _LIMIT_S
    try:
        while not (marks := list_committed(open_store(str(uri)))):
            assert process.poll() is None, log.read_text("utf-8", errors="replace")[-2000:]
            assert time.monotonic() < end
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    return max(mark.step for mark in marks)


def last(uri: Path) -> tuple[int, tuple[str, ...]]:
    """Return step and hashes of the newest checkpoint."""
    store = open_store(str(uri))
    newest = max(list_committed(store), key=lambda mark: mark.step)
    manifest = read_manifest(store, newest)
    return newest.step, tuple(digest for file in manifest.files for digest in file.hashes)


def test_a_killed_run_resumes_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    settings = [part for setting in _SETTINGS for part in ("--set", setting)]
    ends = []
    for name in ("undisturbed", "killed"):
        uri, log = tmp_path / name, tmp_path / f"{name}.log"
        complete("init", "roberta-base", uri, "--tiny", "--corpus", corpus, *settings, log=log)
        if name == "killed":
            assert kill_after_a_commit(uri, log) < _STEPS
        complete("train", uri, log=log)
        ends.append(last(uri))
    assert ends[0] == ends[1]
    assert ends[0][0] == _STEPS
