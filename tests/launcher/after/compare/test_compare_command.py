"""`maskfleet compare` on a real Ray: killed and interrupted on its way, it ends with the page of an undisturbed one."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from checkpoints.listing import committed
from data_service.store.open import open_store
from launcher.contract import REPEAT
from launcher.runtime.run.record import RECORD
from tests.support.runs.small_runs import SETTINGS, SMALL

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS, SEEDS = 24, 2
OPTIONS = [
    *(f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 8}}}}]", "schedule.warmup=3", "trainers=1"),
    "checkpoint={every: {steps: 4}, keep_last: 3}",
    "b:objective.mlm.rate=0.3",
]


def command(inputs: Path, out: Path) -> list[str]:
    places = (f"corpus.sources.text.uri={inputs}/corpus", f"tokenizer.uri={inputs}/tokenizer")
    given = [part for setting in (*places, *SETTINGS, *OPTIONS) for part in ("--set", setting)]
    options = ["--out", str(out), "--seeds", str(SEEDS), "--points", "4"]
    return [sys.executable, "-P", "-m", "maskfleet", "compare", f"a={SMALL}", f"b={SMALL}", *options, *given]


def start(inputs: Path, out: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(inputs, out), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def progress(out: Path) -> int:
    """Steps that are committed, of all runs."""
    stores = [open_store(str(folder)) for folder in sorted(out.glob("runs/*"))]
    return sum(
        max((mark.step for mark in committed(store)), default=0)
        for store in stores
        if store.size(RECORD) is not None
    )


def wait(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> bool:
    """Until it holds, or the command ends. Returns whether it still runs."""
    tick, deadline = threading.Event(), time.monotonic() + 600
    while process.poll() is None and not condition():
        assert time.monotonic() < deadline
        tick.wait(0.1)
    return process.poll() is None


def end(process: "subprocess.Popen[str]", number: int) -> None:
    """A signal to the command; of what a kill leaves behind, everything."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if number == signal.SIGKILL:
        for child in below:
            child.kill()
    said, _ = process.communicate(timeout=600)
    if number != signal.SIGKILL:
        assert process.returncode == REPEAT, said


def figures(out: Path) -> dict[str, object]:
    record = json.loads((out / "compare.json").read_text())
    assert not record["failures"]
    return {
        label: [{seed: run["figures"] for seed, run in one["runs"].items()}, one["curves"]]
        for label, one in record["recipes"].items()
    }


def test_killed_and_interrupted_it_ends_as_if_undisturbed(inputs: Path, tmp_path: Path) -> None:
    undisturbed = start(inputs, tmp_path / "undisturbed")
    said, _ = undisturbed.communicate(timeout=900)
    assert undisturbed.returncode == 0, said
    out, draw = tmp_path / "disturbed", random.Random(4)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process = start(inputs, out)
        further = progress(out) + draw.randrange(1, STEPS)
        if wait(process, lambda: progress(out) >= further):  # noqa: B023
            end(process, number)
    last = start(inputs, out)
    said, _ = last.communicate(timeout=900)
    assert last.returncode == 0, said
    assert figures(out) == figures(tmp_path / "undisturbed")
    again = start(inputs, out)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    assert "training" not in said
