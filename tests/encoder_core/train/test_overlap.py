"""Gradients are added up while the last backward pass runs: the same sums as afterwards, whatever ranks have rows."""

import pytest

from tests.support.ranks import overlap
from tests.support.ranks import small_training as small
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

SETTINGS = [Setting(1, "bf16"), Setting(1, "bf16", clip=None, reduce_dtype="bf16")]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sums_during_the_backward_pass_are_those_after_it(world: int) -> None:
    """Three microbatches: of two ranks one has no rows in its last pass. One step's gradients are not finite."""
    ranks = run_ranks(overlap.both, world, SETTINGS)
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
