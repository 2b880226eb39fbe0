"""The engine's promises: exact resume at equal topology, rounding at any other, at every ZeRO stage."""

import numpy as np
import pytest

from tests.support.ranks import small_training as small
from tests.support.ranks.forked import run_cases
from tests.support.ranks.fragments import Whole
from tests.support.ranks.small_training import Setting, Trace

pytestmark = pytest.mark.cluster

FP32 = [Setting(stage) for stage in (0, 1, 2, 3)]
BF16 = [Setting(stage, "bf16") for stage in (1, 2, 3)]
STEPS, CUT = 4, 2


@pytest.fixture(scope="module")
def whole() -> list[list[Trace]]:
    return run_cases(small.train, 2, FP32 + BF16, 0, STEPS)


@pytest.fixture(scope="module")
def half() -> list[Whole]:
    return [small.assemble(traces) for traces in run_cases(small.train, 2, FP32 + BF16, 0, CUT)]


def test_resume_is_bit_identical_at_equal_topology(whole: list[list[Trace]], half: list[Whole]) -> None:
    resumed = run_cases(small.train, 2, FP32 + BF16, CUT, STEPS, half)
    for setting, undisturbed, after in zip(FP32 + BF16, whole, resumed, strict=True):
        assert after[0].steps == undisturbed[0].steps[CUT:], setting
        assert small.identical(small.assemble(after), small.assemble(undisturbed)), setting


def test_any_topology_and_stage_trains_the_same_model(whole: list[list[Trace]], half: list[Whole]) -> None:
    """Dropout is on; one rank has an idle round (3 microbatches on 2 ranks)."""
    alone = run_cases(small.train, 1, [Setting(0)], 0, STEPS)[0]
    reference = small.assemble(alone)
    for setting, traces in zip(FP32, whole, strict=False):
        np.testing.assert_allclose(
            [step[0] for step in traces[0].steps],
            [step[0] for step in alone[0].steps],
            rtol=2e-6,
            err_msg=str(setting),
        )
        assert small.distance(small.assemble(traces), reference) < 2e-5, setting


def test_a_non_finite_gradient_moves_nothing_on_any_rank(half: list[Whole]) -> None:
    settings = FP32 + BF16
    traces = run_cases(small.train, 2, settings, CUT, CUT + 1, half, CUT)
    for setting, ranks, before in zip(settings, traces, half, strict=True):
        assert [rank.steps[0][2] for rank in ranks] == [False, False], setting
        after = small.assemble(ranks)
        assert small.identical(after, before), setting


@pytest.mark.long
def test_a_gradient_above_the_limit_moves_nothing_and_the_next_step_is_as_if_it_had_not_been(
    half: list[Whole],
) -> None:
    """Step CUT is dropped. Its norm is reported, and what it accumulated does not get into the next step."""
    settings = FP32 + BF16
    traces = run_cases(small.train, 2, settings, CUT, CUT + 2, half, None, {CUT: 1e-3})
    without = run_cases(small.train, 2, settings, CUT + 1, CUT + 2, half)
    for setting, ranks, expected in zip(settings, traces, without, strict=True):
        dropped, following = ranks[0].steps
        assert [rank.steps[0] for rank in ranks] == [dropped, dropped], setting
        assert (dropped[1] > 1e-3, dropped[2]) == (True, False), setting
        assert following == expected[0].steps[0], setting
        assert small.identical(small.assemble(ranks), small.assemble(expected)), setting
