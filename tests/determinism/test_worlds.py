"""Another number of ranks, another ZeRO stage and another microbatch on the way: the batch is the same, and so is what
comes of it, up to rounding. Ranks without Ray here; with Ray, and machines that come and go, in
tests/cluster/test_elastic.py."""

import random
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

    worlds = [event["world"] for event in small_runs.history(run).events if event["kind"] in ("start", "resume")]
    assert worlds == [1, 3, 2]
    assert np.abs(np.subtract(small_runs.losses(run), small_runs.losses(undisturbed))).max() <= EXACT
    assert small_runs.ledger(run) == small_runs.ledger(undisturbed)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    last, calm = (small_runs.history(uri).evaluations[-1] for uri in (run, undisturbed))
    assert last["loss"] == pytest.approx(calm["loss"], abs=EXACT)


WIDE = (
    "phases=[{steps: 14, length: 48, batch: {sequences: 32}}]",
    "model.dropout=0.2",
    "spikes.threshold=1000",
)


@pytest.fixture(scope="module")
def many_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    small_runs.prepare_corpus(folder, documents=90)
    return folder


@pytest.fixture(scope="module")
def at_once(many_texts: Path) -> str:
    """Each step's batch is one microbatch."""
    return finish(small_runs.new_run(many_texts, "at-once", *WIDE, "microbatch=32"), 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_microbatches_of_4_8_and_32_on_1_to_3_ranks_killed_and_resumed(
    many_texts: Path, at_once: str, seed: int
) -> None:
    """In random order, each group killed at a random step but the last."""
    draw = random.Random(seed)
    run = small_runs.new_run(many_texts, f"wandering-{seed}", *WIDE, "microbatch=4")
    for microbatch, kill in zip(draw.sample((4, 8, 32), 3), sorted(draw.sample(range(1, 12), 2)), strict=False):
        small_runs.operate(run, f"zero={draw.randrange(4)}", f"microbatch={microbatch}")
        world = draw.randint(1, 3)
        assert KILLED in run_group(run, world, kill={draw.randrange(world): kill}).codes
    small_runs.operate(run, f"microbatch={draw.choice((4, 8, 32))}")
    finish(run, draw.randint(1, 3))
    assert np.abs(np.subtract(small_runs.losses(run), small_runs.losses(at_once))).max() <= EXACT
    assert small_runs.digests(run) == small_runs.digests(at_once)
