"""Runs with StableAdamW and Muon: they learn, and a killed one goes on as if nothing had happened."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs
from tests.support.runs.small_runs import reconciled

pytestmark = pytest.mark.cluster

OPTIMIZERS = ("muon", "stableadamw")


def settings(optimizer: str, zero: int) -> tuple[str, ...]:
    return f"optimizer={{{optimizer}: {{lr: 4.0e-3}}}}", f"zero={zero}", "spikes.threshold=1000"


@pytest.mark.parametrize(
    ("optimizer", "zero"),
    [
        ("muon", 2),
        *(
            pytest.param(optimizer, zero, marks=pytest.mark.long)
            for optimizer in OPTIMIZERS
            for zero in range(4)
            if (optimizer, zero) != ("muon", 2)
        ),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(folder: Path, optimizer: str, zero: int) -> None:
    name, asked = f"{optimizer}-{zero}", settings(optimizer, zero)
    undisturbed = finish(small_runs.new_run(folder, name, *asked), 2)
    losses = small_runs.losses(undisturbed)
    assert losses[-1] < losses[0] - 0.1, "it learns"
    killed = small_runs.new_run(folder, f"{name}-killed", *asked)
    assert KILLED in run_group(killed, 2, kill={1: 10}).codes
    finish(killed, 2)
    assert "resume" in [event["kind"] for event in small_runs.history(killed).events]
    small_runs.ensure_same(killed, undisturbed, small_runs.STEPS)


@pytest.mark.long
def test_a_change_of_optimizer_that_was_forced_is_refused_by_its_checkpoint(folder: Path) -> None:
    run = finish(small_runs.new_run(folder, "changed"), 1, stop_at=4)
    changed = with_assignments(open_run(run).recipe, settings("muon", 1))
    reconciled(open_run(run), recipe=changed, accept_changes=True, now=datetime.now(UTC))
    ended = run_group(run, 1)
    assert ended.codes != [0]
    assert "optimizer" in ended.output
    assert small_runs.final_state(run, 4), "what it had is still there"
