"""XLNet's memory through real runs: killed, stopped and moved between the steps at which it is recomputed."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import XLNetLMHeadModel

from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest
from checkpoints.verify import find_newest_good, verify
from launcher.after.export.export import ExportResult, export_run
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs
from tests.support.runs.small_runs import reconciled

pytestmark = pytest.mark.cluster

SETTINGS = (
    "model={family: xlnet, layers: 2, hidden: 32, heads: 2, feed_forward: 64, max_length: 64, reuse: 16, memory: 24,"
    " memory_refresh: 4}",
    "input={packing: lanes, reuse: 16}",
    "shuffle=uniform",
    "objective={plm: {predict: 8}}",
    "phases=[{steps: 9, length: 48, batch: {sequences: 12}}, {steps: 6, length: 64, batch: {sequences: 8}}]",
    "checkpoint={every: {steps: 3}, keep_last: 9}",
    "evaluation={every: {steps: 5}, samples: 12}",
)
STEPS = 15
PHASE = 9  # where the second begins
CORPUS = {"documents": 150, "block_tokens": 1024}


def new_run(folder: Path, name: str, stage: int = 2) -> str:
    return small_runs.new_run(folder, name, *SETTINGS, f"zero={stage}")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(new_run(folder, "undisturbed"), 2)


def newest(run: str) -> CheckpointManifest:
    good = find_newest_good(open_run(run).store, SingleRank())
    assert good is not None
    return good.manifest


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_kills_and_stops_change_nothing(folder: Path, stage: int) -> None:
    """Killed, resumed from a periodic checkpoint; stopped one step into a phase, when the memory is half full."""
    undisturbed = finish(new_run(folder, f"undisturbed-{stage}", stage), 2)
    run = new_run(folder, f"disturbed-{stage}", stage)
    assert run_group(run, 2, kill={1: 7}).codes[1] == KILLED
    finish(run, 2, stop_at=PHASE + 1)
    assert newest(run).memory == {f"memory.{layer}": (8, 16, 32) for layer in range(2)}
    finish(run, 2)
    small_runs.ensure_same(run, undisturbed, STEPS)
    saved = [event["step"] for event in small_runs.events(undisturbed, "commit")]
    assert set(saved) <= {4, 8, 12, STEPS}, "periodic checkpoints fall where memory is recomputed"


@pytest.mark.long
def test_the_world_and_the_stage_may_change_between_two_refreshes(folder: Path, undisturbed: str) -> None:
    """2 ranks, 1, and 2 again, each stopped where only the checkpoint knows what is remembered."""
    run = new_run(folder, "moving")
    for world, stage, stop_at, remembered in ((2, 2, 6, (12, 24, 32)), (1, 0, 11, (8, 24, 32))):
        small_runs.operate(run, f"zero={stage}")
        finish(run, world, stop_at=stop_at)
        manifest = newest(run)
        assert (manifest.step, manifest.memory["memory.0"]) == (stop_at, remembered)
        assert verify(open_run(run).store, manifest) == []
    small_runs.operate(run, "zero=3")
    finish(run, 2)
    assert newest(run).memory == {}
    assert small_runs.losses(run) == pytest.approx(small_runs.losses(undisturbed), rel=1e-5)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    exported = export_run(open_run(run), 6, str(folder / "exported"))
    assert exported == ExportResult(6, {".": "XLNetLMHeadModel"}, ()), "memory stays behind"
    assert XLNetLMHeadModel.from_pretrained(folder / "exported").config.mem_len == 24


@pytest.mark.long
def test_other_refreshes_than_the_checkpoint_was_written_for_are_refused(folder: Path) -> None:
    run = new_run(folder, "changed")
    finish(run, 1, stop_at=4)
    opened = open_run(run)
    other = with_assignments(opened.recipe, ("model.memory_refresh=3",))
    reconciled(opened, recipe=other, accept_changes=True, now=datetime.now(UTC))
    refused = run_group(run, 1)
    assert refused.codes != [0]
    assert re.search(r"\bstep 4 .*\bmemory\b", refused.output)
