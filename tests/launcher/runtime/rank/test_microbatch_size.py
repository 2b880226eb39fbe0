"""`microbatch: auto` on CPUs that play GPUs with little memory: the rows are halved until they fit, all ranks take the
same number, nothing is lost or counted twice, and the losses are those of a run that was never disturbed."""

import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.ranks.small_memory import DEVICE, Memory
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

EXACT = 1e-5  # nats
AUTO = ("microbatch=auto", "spikes.threshold=1000")
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """Of batches of 12 rows of 32 tokens, then of 8 of 64."""
    return finish(small_runs.new_run(folder, "given", "spikes.threshold=1000"), 2)


def ensure_same(run: str, undisturbed: str) -> None:
    """The bytes of every step, and the losses up to rounding."""
    apart = np.subtract(small_runs.losses(run), small_runs.losses(undisturbed))
    assert np.abs(apart).max() <= EXACT
    assert small_runs.ledger(run) == small_runs.ledger(undisturbed)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, *range(2, 6)))]
)  # 0: ZeRO 1, 1: ZeRO 2
def test_what_does_not_fit_on_one_rank_is_halved_on_all(folder: Path, undisturbed: str, seed: int) -> None:
    """One rank has less memory, found to be out in a forward pass or somewhere in a backward pass. Killed in between,
    and resumed: then it fits at once."""
    draw = random.Random(seed)
    world, stage = draw.randint(2, 3) if seed else 2, draw.randrange(3)
    least = draw.randint(270_000, 300_000) if world == 3 else draw.randint(300_000, 450_000)
    run = small_runs.new_run(folder, f"little-{seed}", *AUTO, f"zero={stage}")
    kept = [PLENTY] * world
    kept[draw.randrange(world)] = least
    memory = Memory(PLENTY, tuple(kept), backward=draw.choice((0, 1, 3, 10)))
    assert KILLED in run_group(run, world, memory=memory, kill={draw.randrange(world): draw.randint(3, 12)}).codes
    finish(run, world, memory=memory)
    found = small_runs.events(run, "microbatch")
    assert {event["device"] for event in found} == {DEVICE}
    assert found[0]["why"] == "as many as fit by the estimate, shared out evenly"
    assert found[0]["rows"] == [-(-12 // world), -(-8 // world)]
    assert any("did not fit with" in event["why"] for event in found)
    assert found[-1]["rows"][0] <= found[0]["rows"][0] // 2 + 1
    assert all(late["rows"] <= early["rows"] for early, late in pairwise(found))
    again = next(event for event in found if event["why"] == "as many as fitted in earlier starts, shared out evenly")
    assert again["rows"][0] < found[0]["rows"][0]
    ensure_same(run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (2, 3), (3, 2)])
def test_memory_that_gives_out_in_a_step_is_answered_by_a_start_with_half(
    folder: Path, undisturbed: str, stage: int, world: int
) -> None:
    """At stages 0 to 2 what had fitted does not fit any more; at stage 3 nothing was tried beforehand."""
    draw = random.Random(stage)
    run = small_runs.new_run(folder, f"falling-{stage}", *AUTO, f"zero={stage}")
    who, kept = draw.randrange(world), 600_000 if stage == 3 else 300_000  # gathered weights are kept, too
    falls = (who, draw.randint(6, 12) if stage < 3 else 0, kept)
    memory = Memory(PLENTY, (PLENTY,) * world, backward=draw.choice((0, 2, 9)), falls=falls)
    starts = 1
    while run_group(run, world, memory=memory).codes != [0] * world:
        starts += 1
        assert starts < 8
    assert starts > 1
    assert small_runs.events(run, "microbatch")[-1]["rows"] < small_runs.events(run, "microbatch")[0]["rows"]
    ensure_same(run, undisturbed)


@pytest.mark.long
def test_the_estimate_decides_by_the_least_memory(folder: Path) -> None:
    """One row is tried if by the estimate not even that fits."""
    run = small_runs.new_run(folder, "none", *AUTO)
    finish(run, 1, memory=Memory(0, (PLENTY,)), stop_at=1)
    assert [event["rows"] for event in small_runs.events(run, "microbatch")] == [[1, 1]]


@pytest.mark.long
def test_a_row_that_does_not_fit_ends_the_run_with_a_remedy(folder: Path) -> None:
    run = small_runs.new_run(folder, "hopeless", *AUTO)
    ended = run_group(run, 1, memory=Memory(PLENTY, (1000,)))
    assert ended.codes != [0]
    assert re.search(
        r"phases.0: 1 rows of 32 tokens do not fit into the memory of a CPU that plays a GPU", ended.output
    )
    assert "activation_checkpointing: true" in ended.output
