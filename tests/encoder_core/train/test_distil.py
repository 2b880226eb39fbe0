"""A student and its teachers through the engine: steps as plain PyTorch makes them, teachers as they were."""

import numpy as np
import pytest

from tests.support.ranks import distil
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

EXACT = [Setting(stage) for stage in (0, 1, 2, 3)]
HALF = [Setting(stage, "bf16") for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("world", "steps"),
    [(2, 4), *(pytest.param(world, 10, marks=pytest.mark.long) for world in (1, 2))],
)
@pytest.mark.parametrize("name", distil.CASES)
def test_steps_equal_plain_networks_and_teachers_stay_as_they_were(name: str, world: int, steps: int) -> None:
    """At every stage. No state of the optimizer and no fragment of a checkpoint is a teacher's."""
    case = distil.CASES[name]
    norms, weights = distil.reference(case, steps)
    known = range(case.teachers)
    first = [p.detach().numpy() for number in known for p in distil.teacher_network(number).parameters()]
    for rank in run_ranks(distil.train, world, name, EXACT, steps):
        for setting, trace in zip(EXACT, rank, strict=True):
            np.testing.assert_allclose(trace.norms, norms, rtol=1e-5, err_msg=str(setting))
            assert trace.state.keys() == weights.keys()
            for path, expected in weights.items():
                error = np.abs(trace.state[path]["master"].ravel() - expected).max()
                assert error < 1e-6, (setting, path)
            for found, was in zip(trace.teachers, first, strict=True):
                assert np.array_equal(found, was), setting
            assert trace.damage_found == (world > 1), setting


@pytest.mark.long
def test_in_bf16_teachers_are_rounded_once_and_stay_so() -> None:
    import torch

    first = [p.detach().bfloat16().float() for n in (0, 1) for p in distil.teacher_network(n).parameters()]
    for rank in run_ranks(distil.train, 2, "distilbert", HALF, 10):
        for setting, trace in zip(HALF, rank, strict=True):
            assert all(
                torch.equal(torch.from_numpy(a), b) for a, b in zip(trace.teachers, first, strict=True)
            )
            assert np.isfinite(trace.norms).all(), setting
            assert trace.damage_found, setting
