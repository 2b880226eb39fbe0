"""The average of weights: NumPy's formula bit for bit, wherever its elements lie; looking at it changes nothing."""

import numpy as np
import pytest

from encoder_core.train.zero_state import MASTER
from tests.support.ranks import averages
from tests.support.ranks.averages import Averaged
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import Whole, whole
from tests.support.ranks.small_training import Setting, identical

pytestmark = pytest.mark.cluster

DECAY = 0.9
SETTINGS = [Setting(stage, decay=DECAY) for stage in (0, 1, 2, 3)]
SETTINGS += [Setting(stage, "bf16", decay=DECAY) for stage in (1, 2, 3)]
STEPS, CUT, POISONED = 5, 3, 1


def train(
    world: int,
    first: int,
    stop: int,
    states: list[Whole] | None = None,
    poisoned: int | None = None,
    evaluates: bool = True,
) -> list[list[Averaged]]:
    """Settings' lists of ranks."""
    ranks = run_ranks(averages.train, world, SETTINGS, first, stop, states, poisoned, evaluates)
    return [list(each) for each in zip(*ranks, strict=True)]


def state(ranks: list[Averaged]) -> Whole:
    return whole((rank.state for rank in ranks), ranks[0].shapes)


def by_numpy(start: dict[str, np.ndarray], trained: Averaged, decay: float = DECAY) -> dict[str, np.ndarray]:
    """The definition: after each update that was applied, in float32."""
    d = np.float32(decay)
    average = dict(start)
    for weights, applied in zip(trained.weights[1:], trained.applied, strict=True):
        for name in average if applied else ():
            average[name] = d * average[name] + (np.float32(1) - d) * weights[name][MASTER]
    return average


def ensure_equal(found: Whole, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == np.float32
        assert found[name]["average"].tobytes() == values.tobytes(), name


@pytest.fixture(scope="module")
def half() -> list[list[Averaged]]:
    """Two ranks, an evaluation after each step; one update is dropped."""
    return train(2, 0, CUT, poisoned=POISONED)


def test_it_is_numpys_at_every_stage_and_skips_what_was_skipped(half: list[list[Averaged]]) -> None:
    for ranks in half:
        assert ranks[0].applied == [True, False, True]
        first = ranks[0].weights[0]
        ensure_equal(state(ranks), by_numpy({name: kinds[MASTER] for name, kinds in first.items()}, ranks[0]))
        assert not identical(state(ranks), {n: k | {"average": k[MASTER]} for n, k in state(ranks).items()})


def test_evaluating_it_changes_no_bit_and_measures_the_average(half: list[list[Averaged]]) -> None:
    undisturbed = train(2, 0, CUT, poisoned=POISONED, evaluates=False)
    for ranks, calm in zip(half, undisturbed, strict=True):
        assert identical(state(ranks), state(calm))
        for rank in ranks:
            assert rank.figures["average_mlm_loss"] == rank.loss_of_average != rank.figures["mlm_loss"]
            assert {n for n in rank.figures if n.startswith("average_")} == {
                "average_mlm_loss",
                "average_mlm_accuracy",
            }


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("world", [1, 3])
def test_other_ranks_at_other_stages_go_on_with_the_same_bits(half: list[list[Averaged]], world: int) -> None:
    states = [state(ranks) for ranks in half]
    moved = [*states[1:], states[0]]  # to the next stage
    for ranks, before in zip(train(world, CUT, STEPS, moved), moved, strict=True):
        assert all(
            np.array_equal(kinds["average"], before[name]["average"])
            for name, kinds in ranks[0].weights[0].items()
        )
        start = {name: kinds["average"] for name, kinds in before.items()}
        ensure_equal(state(ranks), by_numpy(start, ranks[0]))
