"""Gradients are added up while the last backward pass runs: the same sums as afterwards, whatever ranks have rows."""

import itertools
import random

import numpy as np
import pytest

from encoder_core.train.settings import EngineConfig
from tests.support.ranks import overlap
from tests.support.ranks import small_training as small
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import whole
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

SETTINGS = [Setting(1, "bf16"), Setting(1, "bf16", clip=None, reduce_dtype="bf16")]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sums_during_the_backward_pass_are_those_after_it(world: int) -> None:
    """Three microbatches: of two ranks one has no rows in its last pass. One step's gradients are not finite."""
    ranks = run_ranks(overlap.during_and_after, world, SETTINGS)
    for number in range(len(SETTINGS)):
        during, after = ([rank[which][number] for rank in ranks] for which in (0, 1))
        assert [step[2] for step in during[0].steps] == [True, False, True]
        one, other = small.assemble(during), small.assemble(after)
        if world == 2:  # the sum of two has one order
            assert small.identical(one, other)
            assert during[0].steps[2] == after[0].steps[2]
        elif SETTINGS[number].reduce_dtype == "fp32":
            assert small.distance(one, other) < 1e-6
        else:
            assert small.distance(one, other) < 2e-3
    for _, _, begun in ranks:
        for done, buckets in begun:
            assert buckets > 10
            assert done >= buckets - 1


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (2, "fp32"),
        (3, "bf16"),
        *(
            pytest.param(stage, precision, marks=pytest.mark.long)
            for stage, precision in itertools.product((0, 1, 2, 3), ("fp32", "bf16"))
            if (stage, precision) not in ((2, "fp32"), (3, "bf16"), (0, "bf16"))
        ),
    ],
)
def test_ranks_may_reach_parameters_in_any_order(stage: int, precision: str) -> None:
    """Each rank and step in an order of its own, buckets from less than a parameter to more than all of them."""
    rng = random.Random(stage)
    configs = [
        EngineConfig(stage, precision, 1.0, 0 if stage == 3 else None, reduce_dtype, bucket)  # type: ignore[arg-type]
        for reduce_dtype in {"fp32", precision}
        for bucket in (7, rng.randrange(20, 500), 2**23)
    ]
    cases = [(config, rng.randrange(1000)) for config in configs]
    ranks = run_ranks(overlap.in_any_order, 2, cases)
    for number in range(len(cases)):
        one, other = (whole((rank[number][which][0] for rank in ranks), ranks[0][number][which][1]) for which in (0, 1))
        for name, kinds in one.items():
            for kind, values in kinds.items():
                # A parameter's own gradient is the same whatever comes before it.
                assert np.array_equal(values, other[name][kind]), (configs[number], name, kind)
