"""Another number of ranks, another ZeRO stage and another microbatch on the way: the batch is the same, and so is what
comes of it, up to rounding. Ranks without Ray here; with Ray, and machines that come and go, in
tests/cluster/test_elastic.py."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EXACT = 1e-5  # nats


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(small_runs.new_run(folder, "undisturbed", "zero=1"), 1)


def test_one_rank_then_three_then_two_and_stages_one_three_zero(folder: Path, undisturbed: str) -> None:
    """Three microbatches a step in the first phase, two in the second: neither divides among all the worlds. Then twice
    as many, then four times. The first group is stopped, the second dies."""
    run = small_runs.new_run(folder, "moving", "zero=1")
    finish(run, 1, stop_at=5)
    small_runs.operate(run, "zero=3", "microbatch=2")
    assert run_group(run, 3, kill={2: 11}).codes[2] == KILLED
    small_runs.operate(run, "zero=0", "microbatch=1")
    finish(run, 2)

    worlds = [
        event["world"] for event in small_runs.history(run).events if event["kind"] in ("start", "resume")
    ]
    assert worlds == [1, 3, 2]
    assert np.abs(np.subtract(small_runs.losses(run), small_runs.losses(undisturbed))).max() <= EXACT
    assert small_runs.ledger(run) == small_runs.ledger(undisturbed)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    last, calm = (small_runs.history(uri).evaluations[-1] for uri in (run, undisturbed))
    assert last["loss"] == pytest.approx(calm["loss"], abs=EXACT)
