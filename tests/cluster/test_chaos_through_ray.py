"""Twenty cycles of chaos through the whole command; in the end, the run that nobody disturbed.

`infra/test -m long tests/cluster/test_chaos_through_ray.py -rP` prints what happened and the goodput.
"""

import random
from pathlib import Path

import pytest

from launcher.observe.inspect.report.figures import measure
from tests.support.faults.command import RayChaos
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]

CYCLES, SEED = 20, 21
SETTINGS = (
    "phases=[{steps: 100000, length: 32, batch: {sequences: 48}}]",  # more than there is time for
    "optimizer.adamw.lr=1.0e-4",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 100000}, samples: 20}",
    "watchdog={silence: 5, step: 60, other: 120}",
    "zero=2",
)


def test_twenty_cycles(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=300)
    uri = small_runs.new_run(tmp_path, "chaos", *SETTINGS, "trainers=2")
    chaos = RayChaos(uri, random.Random(SEED))
    steps = chaos.cycles(CYCLES)
    tell(chaos)
    calm = small_runs.new_run(tmp_path, "calm", *SETTINGS)
    finish(calm, 2, stop_at=steps, timeout=1200)
    small_runs.ensure_same(uri, calm, steps)
    small_runs.ensure_whole(uri)


def tell(chaos: RayChaos) -> None:
    figures = measure(small_runs.history(chaos.run))
    assert figures.goodput is not None
    print(f"{CYCLES} cycles, {chaos.starts} commands: {dict(chaos.faults)}")
    times = f"{figures.repeated} repeated, {figures.wall_seconds:.0f} s, goodput {figures.goodput:.1%}"
    print(f"{figures.steps} steps, {times}")
