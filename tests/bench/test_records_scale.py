"""What a look at a run of a million steps costs: `maskfleet runs status` and `maskfleet report`, on a local disk.

Of a run as it is after weeks: thousands of steps of its newest attempt are still in segments, the rest is in packs.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from checkpoints.attempt import claim, newest_attempt_number
from data_service.store.base import Store
from launcher.runtime.run.log import encode_line
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.record import open_run
from launcher.runtime.run.segments import EVENTS, METRICS, segment_key
from tests.support.runs import small_runs

pytestmark = pytest.mark.long

STEPS = int(os.environ.get("MASKFLEET_BENCH_STEPS", 1_000_000))
SEGMENT_STEPS = 30  # a step a second, a segment every 30 seconds
ATTEMPT_STEPS = 50_000  # then it dies, 400 steps after its last checkpoint
REPEATED = 400
COMMIT_STEPS = 1000
MEBIBYTE = 1 << 20
MAX_PACK_BYTES, MOST_SECONDS = 300 * MEBIBYTE, 10.0

# The command line in a process of its own, and the most memory that it ever held: by the kernel's high-water mark of
# that program, for the resource usage of a process counts what it was before, too: a copy of this one.
COMMAND = """
import json, pathlib, sys, time
from launcher.app.cli.main import main
try:
    main()
finally:
    line = next(line for line in pathlib.Path("/proc/self/status").open() if line.startswith("VmHWM"))
    print(json.dumps([time.process_time(), 1024 * int(line.split()[1])]), file=sys.stderr)
"""


def record(step: int, draw: np.ndarray) -> dict[str, object]:
    loss = 2.0 + 8.0 / (1.0 + step / 2e4) + 0.05 * float(draw[0])
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "mlm_loss": loss,
        "mlm_accuracy": 0.5 + 0.01 * float(draw[1]),
        "tokens": 1_048_576 - int(1000 * abs(draw[2])),
        "targets": 157_286,
        "lr": 1e-4 * (1.0 - step / STEPS),
        "grad_norm": 1.0 + 0.1 * float(draw[3]),
        "skipped": False,
        "seconds": 1.0 + 0.01 * float(draw[4]),
        "data_wait": 0.001 * abs(float(draw[5])),
        "data_wait_share": 0.001 * abs(float(draw[5])),
        "samples": [[step // 10_000, 2048 * step, 2048 * (step + 1)]],
        "digest": int(1e9 * abs(draw[6])),
    }


def write_attempt(store: Store, attempt: int, begin: int, stop: int) -> int:
    """As a rank does; returns how many segments that makes."""
    random = np.random.default_rng(attempt)
    for number, first in enumerate(range(begin, stop, SEGMENT_STEPS)):
        steps = range(first, min(first + SEGMENT_STEPS, stop))
        lines = [
            encode_line(record(step, draw)) for step, draw in zip(steps, random.normal(size=(30, 8)), strict=False)
        ]
        lines += [
            encode_line({"kind": "evaluation", "step": step + 1, "loss": 3.0, "mlm_loss": 3.0, "perplexity": 20.1})
            for step in steps
            if (step + 1) % 5000 == 0
        ]
        write_quickly(store, segment_key(METRICS, attempt, number), "".join(lines))
    return number + 1


def write_events(store: Store, attempt: int, begin: int, stop: int) -> None:
    about = {"attempt": attempt}
    events = [{"time": 1.7e9 + begin, "kind": "resume" if begin else "start", "step": begin, **about}]
    events += [
        {"time": 1.7e9 + step, "kind": "commit", "step": step, "seconds": 9.0, "blocked": 0.1, **about}
        for step in range(begin + COMMIT_STEPS, stop, COMMIT_STEPS)
    ]
    for number, event in enumerate(events):
        write_quickly(store, segment_key(EVENTS, attempt, number), encode_line(event))


def write_quickly(store: Store, key: str, text: str) -> None:
    """Without waiting for the disk, as nothing is to be kept."""
    path = Path(store.uri, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run that was started every `ATTEMPT_STEPS` steps."""
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run")
    store, attempt, begin = open_run(uri).store, 0, 0
    while begin < STEPS:
        attempt = claim(store).number
        stop = min(begin + ATTEMPT_STEPS, STEPS)
        write_attempt(store, attempt, begin, stop)
        write_events(store, attempt, begin, stop)
        begin = stop if stop == STEPS else stop - REPEATED
    return uri


@dataclass(frozen=True)
class Cost:
    """Of a command: seconds by the clock and of processors, the most bytes of memory, and what it printed."""

    wall: float
    busy: float
    memory: int
    output: str


def measure(*arguments: str) -> Cost:
    begun = time.monotonic()
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    busy, memory = json.loads(done.stderr.splitlines()[-1])
    return Cost(time.monotonic() - begun, busy, memory, done.stdout)


def look(run: str, page: Path, when: str) -> dict[str, Cost]:
    commands = {
        "runs status": ("runs", "status", run, "--json"),
        "runs status --brief": ("runs", "status", run, "--brief"),
        "report": ("report", run, "--out", str(page), "--no-baselines"),
    }
    found = {name: measure(*arguments) for name, arguments in commands.items()}
    for name, cost in found.items():
        seconds = f"{cost.wall:.1f} s, of processors {cost.busy:.1f} s"
        print(f"{when}: {name}: {seconds}, {cost.memory / MEBIBYTE:.0f} MiB", flush=True)
    return found


def objects(store: Store) -> int:
    return sum(1 for _ in store.list(f"{METRICS}/"))


@pytest.mark.timeout(3600)
def test_a_million_steps(run: str, tmp_path: Path) -> None:
    store = open_run(run).store
    print(f"{STEPS:,} steps, {objects(store):,} objects")
    loose = look(run, tmp_path / "loose.html", "in segments")
    begun = time.monotonic()
    newest = newest_attempt_number(store)
    for attempt in range(1, newest + 1):
        while pack_once(store, attempt, ended=attempt < newest):
            pass
    print(f"packed in {time.monotonic() - begun:.0f} s to {objects(store):,} objects")
    packed = look(run, tmp_path / "packed.html", "packed")
    status, before = json.loads(packed["runs status"].output), json.loads(loose["runs status"].output)
    assert status == before
    assert (status["step"], status["damage"]) == (STEPS, [])
    assert (tmp_path / "packed.html").stat().st_size < 4 * MEBIBYTE
    for name, cost in packed.items():
        assert cost.memory < MAX_PACK_BYTES, name
        assert cost.busy < MOST_SECONDS, f"{name}: by the clock it takes as long as other processes let it"
