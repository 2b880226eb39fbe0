"""A bit of one rank's weights turns over, as memory and links do without a word: found, not committed, undone."""

from pathlib import Path

import pytest

from tests.support.ranks.run_group import FLIPPED, finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

SETTINGS = ("checkpoint={every: {steps: 4}, keep_last: 3}", "weight_check={every: 1}")
STEP = 6


def corruption(uri: str) -> dict[str, object]:
    (event,) = small_runs.events(uri, "corruption")
    return {name: event[name] for name in ("step", "ranks", "tensor")}


@pytest.mark.parametrize(("stage", "tensor"), [pytest.param(0, FLIPPED, marks=pytest.mark.long), (1, None)])
def test_a_flipped_bit_is_found_and_undone(folder: Path, stage: int, tensor: str | None) -> None:
    """At stage 1 the update has overwritten the damaged weight by the time ranks compare, but not the digest."""
    undisturbed = small_runs.new_run(folder, f"undisturbed-{stage}", *SETTINGS, f"zero={stage}")
    finish(undisturbed, 3)

    run = small_runs.new_run(folder, f"flipped-{stage}", *SETTINGS, f"zero={stage}")
    ended = run_group(run, 3, flip=(1, STEP))
    assert 0 not in ended.codes, ended.output
    found = corruption(run)
    assert found == {"step": STEP, "ranks": [1], "tensor": tensor}
    assert small_runs.history(run).steps[-1]["step"] == STEP - 1, "no step is recorded that used the weight"

    finish(run, 3)
    small_runs.ensure_same(run, undisturbed, small_runs.STEPS)


def test_no_commit_is_made_of_damaged_weights(folder: Path) -> None:
    """Looked at commits only: at stage 0 damage stays until then. Of two ranks, nobody knows which is right."""
    settings = ("checkpoint={every: {steps: 4}, keep_last: 3}", "weight_check={every: null}", "zero=0")
    run = small_runs.new_run(folder, "at-commits", *settings)
    assert run_group(run, 2, flip=(0, 5)).codes != [0, 0]
    assert corruption(run)["step"] == 8
    assert corruption(run)["ranks"] == []
    history = small_runs.history(run)
    assert [event["step"] for event in history.events if event["kind"] == "commit"] == [4]
    finish(run, 2)
    begins = small_runs.events(run, "resume")
    assert [event["step"] for event in begins] == [4]
