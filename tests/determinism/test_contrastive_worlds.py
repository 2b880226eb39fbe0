"""Contrastive runs, whose every example depends on all of its batch, moved to other ranks on the way."""

from pathlib import Path

import pytest

from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

SIMCSE = (
    "input={packing: sentences, shortest: 2}",
    "objective={contrastive: {projection: true, pooling: cls, bidirectional: true, matryoshka: [32, 12]}}",
)
CORPUS = {"documents": 60}


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(small_runs.new_run(folder, "undisturbed", *SIMCSE, "zero=2"), 2)


@pytest.mark.long
def test_the_world_and_the_stage_may_change_on_the_way(folder: Path, undisturbed: str) -> None:
    """1 rank at ZeRO 0, then 3 at ZeRO 3, one of which idles in the second phase, then 2: the losses stay."""
    run = small_runs.new_run(folder, "moving", *SIMCSE, "zero=0")
    for world, stage, stop_at in ((1, 0, 4), (3, 3, 11), (2, 1, None)):
        small_runs.operate(run, f"zero={stage}")
        finish(run, world, stop_at=stop_at)
    assert small_runs.losses(run) == pytest.approx(small_runs.losses(undisturbed), rel=1e-4)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    ours, theirs = (small_runs.history(uri).evaluations[-1] for uri in (run, undisturbed))
    assert {**ours, "kind": 0} == pytest.approx({**theirs, "kind": 0}, rel=1e-3)
