"""The evidence page's program in its smallest form: killed at random and started again, it gives the same page.

`infra/test -m long tests/bench/test_evidence.py`; takes some minutes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

PROGRAM = Path(__file__).parent / "evidence"
COMPARISON = {
    "vocabulary": 400,
    "sample": 200_000,
    "heldout": 0.1,
    "weights": {"technical": 0.7, "reviews": 0.3},
    "pretraining": {
        "tokens": 5120,
        "batch": 256,
        "short": {"length": 24, "share": 0.5},
        "length": 32,
        "warmup": 0.1,
        "points": 2,
        "seeds": [1],
        "settings": {
            "microbatch": 16,
            "trainers": 1,
            "zero": 0,
            "evaluation.samples": 16,
            "data_service": {"workers": 1, "memory": "64MiB"},
            "logging": {"flush_seconds": 1.0, "tensorboard": False},
        },
    },
    "families": {
        "roberta": {"recipe": "roberta-base", "tokenizer": "byte_bpe"},
        "electra": {"recipe": "electra-small", "tokenizer": "wordpiece"},
    },
    "domain": {
        "dev": 0.2,
        "test": 0.2,
        "train_examples": 20,
        "dev_examples": 10,
        "test_examples": 10,
        "sections": {"why": ["motivation"], "what": ["design"], "open": ["open issues"]},
    },
    "finetuning": {"lr": 1.0e-3, "epochs": 1},
    "vectors": {"families": ["roberta"], "steps": 4, "batch": 8, "lr": 1.0e-4},
}
TEXT = "the parser reads every module once and keeps what it needs because a name may be bound later"
WORDS = TEXT.split()
KILLS = 3


def write_inputs(folder: Path) -> list[str]:
    """Text with sections, a task of films and pairs with scores; the program's options that name them."""
    draw = random.Random(1)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=16)) + " ."

    records = []
    for number in range(60):
        parts = [
            f"## {title}\n\n{sentence()} with `code` in it.\n\n{sentence()}"
            for title in ("Motivation", "Design", "Open issues")
        ]
        records.append(json.dumps({"id": f"proposal-{number}-of-words", "text": "\n\n".join(parts)}))
    (folder / "text.jsonl").write_text("\n".join(records) + "\n")
    films = folder / "sst2"
    films.mkdir()
    for split in ("train", "dev", "test"):
        lines = (f"{' '.join(draw.choices(WORDS, k=9))} {split} {row}\t{row % 2}\n" for row in range(60))
        (films / f"{split}.tsv").write_text("".join(lines))
    scored = "".join(f"{row % 6}\t{sentence()}\t{sentence()}\n" for row in range(30))
    (folder / "words.test.tsv").write_text(scored)
    (folder / "comparison.yaml").write_text(yaml.safe_dump(COMPARISON))
    return [
        *(
            "--text",
            str(folder / "text.jsonl"),
            "--sst2",
            str(films),
            "--sts",
            str(folder / "words.test.tsv"),
        ),
        *("--comparison", str(folder / "comparison.yaml")),
    ]


@contextmanager
def started(workdir: Path, options: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(workdir), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it has started; its jobs are in sessions of their own."""
    try:
        started_by_it = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started_by_it = []
    process.kill()
    for child in started_by_it:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def page(workdir: Path, options: list[str]) -> str:
    with started(workdir, options) as process:
        said = process.communicate()[0].decode()
        assert process.returncode == 0, said
    return (workdir / "RESULTS.md").read_text()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_killed_and_started_again_it_gives_the_same_page(tmp_path: Path) -> None:
    options = write_inputs(tmp_path)
    began = time.monotonic()
    undisturbed = page(tmp_path / "undisturbed", options)
    lasted = time.monotonic() - began
    draw = random.Random(int(os.environ.get("MASKFLEET_SEED", "5")))
    tick = threading.Event()
    for _ in range(KILLS):
        with started(tmp_path / "killed", options) as process:
            tick.wait(draw.uniform(0.1, 0.6) * lasted)
            if draw.random() < 0.3:
                process.send_signal(signal.SIGTERM)
                process.wait()
                assert process.returncode in (0, 75)
    assert page(tmp_path / "killed", options) == undisturbed
    for told in ("| roberta | 1 |", "| electra | 1 |", "after SimCSE", "from scratch", "words"):
        assert told in undisturbed
    assert "What failed" not in undisturbed


@pytest.mark.long
@pytest.mark.cluster
def test_a_mistake_is_told_in_two_lines(tmp_path: Path) -> None:
    options = write_inputs(tmp_path)
    options[1] = str(tmp_path / "absent")
    with started(tmp_path / "work", options) as process:
        said = process.communicate()[0].decode()
    assert process.returncode == 2
    assert "absent: " in said
    assert "Traceback" not in said
