"""A long run grows nothing: memory and descriptors of every process of the command, over 20,000 steps.

`infra/test -m long tests/cluster/test_growth.py -rP` prints what it measured; `MASKFLEET_GROWTH_STEPS` asks for fewer.
"""

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.runs.observer import MARK, Processes
from tests.support.runs.small_runs import new_run
from tests.support.runs.train_command import committed

STEPS = int(os.environ.get("MASKFLEET_GROWTH_STEPS", "20000"))
EVERY = STEPS // 100
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 4}}}}]",
    f"checkpoint={{every: {{steps: {EVERY}}}, keep_last: 2}}",
    f"evaluation={{every: {{steps: {EVERY}}}, samples: 8}}",
    "logging={flush_seconds: 1, tensorboard: true}",
    "spikes.threshold=null",
    "microbatch=2",
    "data_service={workers: 1, memory: 2MiB}",  # full soon: the feed holds windows until then
    "trainers=2",
)
CORPUS = {"documents": 400, "block_tokens": 1024}
SETTLED = 0.5  # share of the steps after which everything has been done often
MOST_A_STEP = 512.0  # bytes of private memory: half a gigabyte in a million steps
MOST_DESCRIPTORS = 3  # those of a request that is under way

Sample = tuple[int, float, float, int]
"""Steps done, private and resident memory in bytes, descriptors."""


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(5400)
def test_memory_and_descriptors_stay(folder: Path) -> None:
    samples = measured(new_run(folder, "long", *SETTINGS), folder)
    wrong = []
    for name, own in sorted(samples.items()):
        steps, private, resident, descriptors = np.array(own, dtype=np.float64).T
        settled = steps >= SETTLED * STEPS
        if np.count_nonzero(settled) < 10:  # a process that came and went
            continue
        slope, resident_slope = (growth(steps[settled], kind[settled]) for kind in (private, resident))
        later = descriptors[settled]
        print(
            f"{name}: {private[-1] / 2**20:.1f} MiB private, {slope:+.0f} bytes a step; {resident[-1] / 2**20:.1f} MiB "
            f"resident, {resident_slope:+.0f}; descriptors {later[0]:.0f} to {later[-1]:.0f}, most {later.max():.0f}"
        )
        if slope > MOST_A_STEP or later[len(later) // 2 :].min() > later[0] + MOST_DESCRIPTORS:
            wrong.append(name)
    assert any(name.startswith("rank (") for name in samples)
    assert not wrong


def growth(steps: "np.ndarray", size: "np.ndarray") -> float:
    """Bytes a step: the middle one of the slopes of three stretches. What grows does so in most of them; a heap that
    becomes larger once does not."""
    thirds = zip(np.array_split(steps, 3), np.array_split(size, 3), strict=True)
    return float(np.median([np.polyfit(steps, size, 1)[0] for steps, size in thirds]))


def measured(uri: str, folder: Path) -> dict[str, list[Sample]]:
    """Of each process, by kind and number, whenever a checkpoint was committed."""
    processes, samples = Processes(f"{MARK}={folder.name}-growth"), defaultdict[str, list[Sample]](list)
    tick, seen = threading.Event(), 0
    with (folder / "shown.txt").open("w") as shown:
        command = subprocess.Popen(
            [str(Path(sys.executable).with_name("maskfleet")), "train", uri],
            env=os.environ | {"OMP_NUM_THREADS": "1", MARK: f"{folder.name}-growth"},
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    processes.commands.append(command.pid)
    kept = (folder / "samples.jsonl").open("w")  # for whoever looks before the end
    try:
        while command.poll() is None:
            tick.wait(1.0)
            if (step := committed(uri)) > seen:
                seen = step
                for one in processes.alive():
                    if (found := _sample(one)) is not None:
                        name = f"{processes.kind(one)} ({one.pid})"
                        samples[name].append((step, *found))
                        print(json.dumps([name, *samples[name][-1]]), file=kept, flush=True)
        assert command.returncode == 0, (folder / "shown.txt").read_text()[-3000:]
        return samples
    finally:
        kept.close()
        processes.kill()


def _sample(process: psutil.Process) -> tuple[float, float, int] | None:
    """None if it has ended meanwhile."""
    try:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if line.startswith(("RssAnon", "VmRSS"))
        )
        private, resident = (1024.0 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS"))
        return private, resident, len(os.listdir(f"/proc/{process.pid}/fd"))
    except (OSError, KeyError, psutil.Error):
        return None
