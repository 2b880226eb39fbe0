"""The average of weights in whole runs: from step to step it is NumPy's formula bit for bit, on any ranks. Ranks
without Ray here; with Ray, and any fault, in tests/faults/test_anything.py."""

import random
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from checkpoints.load import CheckpointReader
from launcher.errors import RunChanged
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.fork import fork
from launcher.runtime.run.record import open_run, select_checkpoint
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs
from tests.support.runs.small_runs import reconciled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DECAY = 0.9
AVERAGE = f"average.ema={DECAY}"
AT_STOPS = "checkpoint={every: {minutes: 60}, keep_last: 30}"
Values = dict[str, np.ndarray]


def stored(uri: str, step: int, kind: str) -> Values:
    """All parameters' values of a kind in the checkpoint of `step`."""
    run = open_run(uri)
    manifest = select_checkpoint(run, step)
    with CheckpointReader(run.store, manifest) as reader:
        return {name: reader.read_full(name, kind).numpy() for name in manifest.shapes}


def ensure_followed(uri: str, step: int, before: Values) -> None:
    """The average of `step` is made of the one before and the step's weights."""
    weights, average, d = stored(uri, step, "master"), stored(uri, step, "average"), np.float32(DECAY)
    for name, past in before.items():
        expected = d * past + (np.float32(1) - d) * weights[name]
        assert average[name].tobytes() == expected.tobytes(), (step, name)
    assert any((weights[name] != values).any() for name, values in average.items())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_step_by_step_through_all_stages_on_1_to_3_ranks(folder: Path, seed: int) -> None:
    """Each step by another group, one of which is killed first."""
    draw = random.Random(seed)
    run = small_runs.new_run(folder, f"wandering-{seed}", AVERAGE, AT_STOPS)
    for step, stage in enumerate(draw.sample(range(4), 4), start=3):
        world = draw.randint(1, 3)
        small_runs.operate(run, f"zero={stage}")
        if step == 5:
            assert KILLED in run_group(run, world, kill={draw.randrange(world): 6}).codes
        finish(run, world, stop_at=step)
        if step > 3:
            ensure_followed(run, step, stored(run, step - 1, "average"))


def test_a_run_without_one_may_get_one_that_begins_at_its_weights(folder: Path) -> None:
    """Only if the user insists, or in a fork; and a fork may leave it."""
    run = small_runs.new_run(folder, "later", AT_STOPS)
    finish(run, 1, stop_at=5)
    with pytest.raises(RunChanged):
        small_runs.operate(run, AVERAGE)
    opened, forked, left = open_run(run), f"{folder}/later-fork", f"{folder}/left"
    fork(opened, forked, None, (AVERAGE,), keep_position=False, now=datetime.now(UTC))
    wanted = with_assignments(opened.recipe, (AVERAGE,))
    reconciled(opened, recipe=wanted, accept_changes=True, now=datetime.now(UTC))
    for uri in (run, forked):
        finish(uri, 1, stop_at=6)
        ensure_followed(uri, 6, stored(run, 5, "master"))
    fork(open_run(forked), left, 6, ("average=null",), keep_position=False, now=datetime.now(UTC))
    finish(left, 1)
    finish(run, 1)
    assert select_checkpoint(open_run(left), None).kinds == ("exp_avg", "exp_avg_sq", "master")
    for name, values in stored(left, small_runs.STEPS, "master").items():
        assert np.array_equal(values, stored(run, small_runs.STEPS, "master")[name])
