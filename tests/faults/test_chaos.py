"""Random faults, cycle after cycle, and in the end the run nobody disturbed: the same bits, no sample lost or repeated.

The hundred cycles: `infra/test -m long tests/faults/test_chaos.py -rP`, which prints what happened and the goodput.
"""

import random
from pathlib import Path

import pytest

from launcher.observe.inspect.report.figures import compute_figures
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run
from tests.support.faults.ranks import Chaos
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

SEED = 20
SETTINGS = (
    "checkpoint={every: {steps: 3}, keep_last: 3}",
    "weight_check={every: 1}",
    "evaluation={every: {steps: 50}, samples: 20}",
)


def phases(steps: int) -> str:
    """Two, of different lengths and batches, so that faults fall on both sides of the change."""
    first, second = "length: 32, batch: {sequences: 12}", "length: 64, batch: {sequences: 8}"
    return f"phases=[{{steps: {steps // 2}, {first}}}, {{steps: {steps - steps // 2}, {second}}}]"


def survive(root: str, cycles: int, world: int, zero: int, proxy: FaultProxy | None = None) -> None:
    """`cycles` faults on a run over the corpus in `root`; then the comparison."""
    steps = 12 + 6 * cycles  # a cycle gets 8 steps ahead at most, and rarely
    settings = (*SETTINGS, phases(steps), f"zero={zero}")
    calm = finish(small_runs.new_run(root, f"calm-{zero}", *settings), world, timeout=600)
    run = small_runs.new_run(root, f"chaos-{zero}", *settings)
    chaos = Chaos(run, world, random.Random(SEED), proxy)
    for _ in range(cycles):
        chaos.cycle()
    finish(run, world, timeout=600)
    tell(chaos, cycles)
    small_runs.ensure_same(run, calm, steps)
    small_runs.ensure_whole(run)


def tell(chaos: Chaos, cycles: int) -> None:
    figures = compute_figures(read_history(open_run(chaos.run).store))
    assert figures.goodput is not None
    print(f"{cycles} cycles on {chaos.world} ranks, {chaos.fired} faults that struck: {dict(chaos.faults)}")
    times = f"{figures.repeated} repeated, {figures.wall_seconds:.0f} s, goodput {figures.goodput:.1%}"
    print(f"{figures.steps} steps, {times}")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    small_runs.prepare_corpus(tmp_path)
    return str(tmp_path)


@pytest.mark.long
def test_a_few_cycles(folder: str) -> None:
    survive(folder, cycles=4, world=2, zero=1)


@pytest.mark.long
@pytest.mark.parametrize(("world", "zero"), [(2, 1), (3, 2)])
def test_a_hundred_cycles(folder: str, world: int, zero: int) -> None:
    survive(folder, cycles=50, world=world, zero=zero)


@pytest.mark.long
@pytest.mark.rgw
def test_cycles_on_a_failing_object_store(rgw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"s3://{rgw.new_bucket()}"
    with FaultProxy(rgw.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        small_runs.prepare_corpus(tmp_path, root)
        survive(root, cycles=20, world=2, zero=1, proxy=proxy)
