"""SIGKILL of ranks at every ZeRO stage: the run goes on as if nothing had happened. Ranks without Ray here; with Ray
in tests/cluster."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, str]:
    """ZeRO stage -> URI of a run nobody disturbed."""
    found = {}
    for stage in (0, 1, 2, 3):
        found[stage] = small_runs.new_run(folder, f"undisturbed-{stage}", f"zero={stage}")
        finish(found[stage], 2)
    return found


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("stage", "rank", "step"), [(0, 1, 5), (1, 0, 10), (2, 1, 7), (3, 0, 4)])
def test_a_killed_rank_changes_nothing(
    folder: Path, undisturbed: dict[int, str], stage: int, rank: int, step: int
) -> None:
    run = small_runs.new_run(folder, f"killed-{stage}", f"zero={stage}")
    ended = run_group(run, 2, kill={rank: step})
    assert ended.codes[rank] == KILLED, ended.output
    assert ended.codes[1 - rank] not in (0, KILLED), "a rank must not go on alone, nor hang"
    if stage == 2:
        assert run_group(run, 2, kill={0: step + 3, 1: step + 3}).codes == [KILLED, KILLED]
    finish(run, 2)
    same_outcome(run, undisturbed[stage])


def same_outcome(run: str, undisturbed: str) -> None:
    assert small_runs.losses(run) == small_runs.losses(undisturbed)
    assert small_runs.final_state(run) == small_runs.final_state(undisturbed)
    assert small_runs.ledger(run) == small_runs.ledger(undisturbed)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    last = small_runs.history(run).evaluations[-1]
    assert last == small_runs.history(undisturbed).evaluations[-1]


def test_the_ledger_has_no_gap_and_no_repeat(undisturbed: dict[int, str]) -> None:
    """Every step's samples begin where the last step's ended; an epoch is left only at its end or the phase's."""
    spans = small_runs.ledger(undisturbed[0])
    for (epoch, _, stop), (next_epoch, start, _) in pairwise(spans):
        assert (next_epoch, start) in ((epoch, stop), (epoch + 1, 0))
    assert len(spans) > small_runs.STEPS, "the corpus is small enough for epochs to end inside the run"


def test_the_world_and_the_stage_may_change_on_the_way(folder: Path, undisturbed: dict[int, str]) -> None:
    """2 ranks at ZeRO 2, then 1 at ZeRO 0, then 3 at ZeRO 3, then 2 again: the losses stay, up to rounding."""
    run = small_runs.new_run(folder, "moving", "zero=2")
    for world, stage, stop_at in ((2, 2, 4), (1, 0, 8), (3, 3, 11), (2, 1, None)):
        small_runs.operate(run, f"zero={stage}")
        finish(run, world, stop_at=stop_at)
    assert small_runs.losses(run) == pytest.approx(small_runs.losses(undisturbed[2]), rel=1e-5)
    assert small_runs.digests(run) == small_runs.digests(undisturbed[2])


@pytest.mark.long
def test_batches_by_tokens_survive_too(folder: Path) -> None:
    """DOC-SENTENCES with a token budget: the rows of a step, and so of every microbatch, vary."""
    settings = ("input.packing=doc_sentences", "phases=[{steps: 8, length: 32, batch: {tokens: 300}}]")
    calm = small_runs.new_run(folder, "tokens-undisturbed", *settings)
    finish(calm, 2)
    run = small_runs.new_run(folder, "tokens-killed", *settings)
    assert run_group(run, 2, kill={1: 5}).codes[1] == KILLED
    finish(run, 2)
    assert small_runs.losses(run) == small_runs.losses(calm)
    assert small_runs.digests(run) == small_runs.digests(calm)
    assert small_runs.final_state(run, 8) == small_runs.final_state(calm, 8)
    rows = {stop - start for _, start, stop in small_runs.ledger(run)}
    assert len(rows) > 1
