"""SIGKILL of ranks at every ZeRO stage: the run goes on as if nothing had happened. Ranks without Ray here; with Ray
in tests/cluster."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[int], str]:
    """ZeRO stage -> URI of a run nobody disturbed."""
    return cache(lambda stage: finish(small_runs.new_run(folder, f"undisturbed-{stage}", f"zero={stage}"), 2))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("stage", "rank", "step"), [(0, 1, 5), (1, 0, 10), (2, 1, 7), (3, 0, 4)])
def test_a_killed_rank_changes_nothing(
    folder: Path, undisturbed: Callable[[int], str], stage: int, rank: int, step: int
) -> None:
    run = small_runs.new_run(folder, f"killed-{stage}", f"zero={stage}")
    ended = run_group(run, 2, kill={rank: step})
    assert ended.codes[rank] == KILLED, ended.output
    assert ended.codes[1 - rank] not in (0, KILLED), "a rank must not go on alone, nor hang"
    if stage == 2:
        assert run_group(run, 2, kill={0: step + 3, 1: step + 3}).codes == [KILLED, KILLED]
    finish(run, 2)
    calm = undisturbed(stage)
    small_runs.ensure_same(run, calm, small_runs.STEPS)
    assert small_runs.history(run).evaluations[-1] == small_runs.history(calm).evaluations[-1]


def test_the_ledger_has_no_gap_and_no_repeat(undisturbed: Callable[[int], str]) -> None:
    """Every step's samples begin where the last step's ended; an epoch is left only at its end or the phase's."""
    small_runs.ensure_whole(undisturbed(0))
    assert len(small_runs.ledger(undisturbed(0))) > small_runs.STEPS, (
        "the corpus is small enough for epochs to end inside the run"
    )


@pytest.mark.long
def test_batches_by_tokens_survive_too(folder: Path) -> None:
    """DOC-SENTENCES with a token budget: the rows of a step, and so of every microbatch, vary."""
    settings = ("input.packing=doc_sentences", "phases=[{steps: 8, length: 32, batch: {tokens: 300}}]")
    calm = finish(small_runs.new_run(folder, "tokens-undisturbed", *settings), 2)
    run = small_runs.new_run(folder, "tokens-killed", *settings)
    assert run_group(run, 2, kill={1: 5}).codes[1] == KILLED
    finish(run, 2)
    small_runs.ensure_same(run, calm, 8)
    rows = {stop - start for _, start, stop in small_runs.ledger(run)}
    assert len(rows) > 1
