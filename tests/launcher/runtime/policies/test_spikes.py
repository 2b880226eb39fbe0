"""What counts as a spike, and what follows: tables, and properties of the detector on made-up losses."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind
from launcher.runtime.policies.failures import StopDecision
from launcher.runtime.policies.spikes import (
    LOSS,
    SpikeHistory,
    Spikes,
    SpikeVerdict,
    decide_after_spike,
    describe_bad_step,
    max_allowed_figure,
    next_history,
    should_go_back,
    upper_bound,
)

SETTINGS = Spikes(window=8, threshold=5.0, patience=3, most_rewinds=2)
NAN = math.nan


def watch(settings: Spikes, losses: list[float], phases: int = 10**9) -> list[SpikeHistory]:
    """What is remembered after each step, the first being step 0; a phase has so many steps."""
    recent, found = SpikeHistory(), []
    for step, loss in enumerate(losses):
        recent = next_history(settings, recent, step // phases, step, {LOSS: loss}, updated=math.isfinite(loss))
        found.append(recent)
    return found


def reached(settings: Spikes, losses: list[float]) -> int | None:
    """Steps done when the run would go back first."""
    for steps, recent in enumerate(watch(settings, losses), start=1):
        if should_go_back(settings, recent, steps):
            return steps
    return None


def noisy(steps: int, level: float = 3.0) -> list[float]:
    """Losses that scatter around a level by up to 4 %, the same at every call."""
    return [level * (1 + 0.04 * math.sin(2.39996 * step)) for step in range(steps)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (noisy(100), None),
        (noisy(20) + [9.0] * 2 + noisy(20), None),  # not long enough
        (noisy(20) + [9.0] * 3, 23),
        (noisy(20) + [9.0] * 30, 23),  # at once, not when the loss has become the measure
        ([*noisy(20), 9.0, 9.0, 3.0, 9.0, 9.0, 3.0], None),  # not in a row
        ([*noisy(20), 9.0, NAN, 9.0], 23),
        (noisy(20) + [NAN] * 3, 23),
        ([NAN] * 3, 3),  # what is not finite needs no measure
        ([9.0] * 3 + noisy(4), None),  # too early to tell
        (noisy(20) + [1.0] * 30, None),  # a low loss is no spike
        ([10.0 - 0.1 * step for step in range(80)], None),  # nor is learning
        (noisy(20) + [3.2] * 30, None),  # within 5 spreads
        ([3.0] * 20 + [3.1] * 30, None),  # a spread is at least 1 % of the median
        ([3.0] * 20 + [3.2] * 30, 23),
    ],
)
def test_which_losses_make_a_run_go_back(losses: list[float], expected: int | None) -> None:
    assert reached(SETTINGS, losses) == expected


def test_without_a_threshold_only_what_is_not_finite_counts() -> None:
    settings = SETTINGS.model_copy(update={"threshold": None})
    assert reached(settings, noisy(20) + [90.0] * 30) is None
    assert reached(settings, noisy(20) + [NAN] * 3) == 23


def test_a_step_that_was_not_updated_counts_whatever_its_loss() -> None:
    recent = SpikeHistory()
    for step in range(3):
        recent = next_history(SETTINGS, recent, 0, step, {LOSS: 3.0}, updated=False)
    assert (recent.since, recent.series) == (0, {})
    assert should_go_back(SETTINGS, recent, 3)


def test_a_new_phase_is_measured_by_its_own_losses() -> None:
    """Longer rows, a higher loss: no spike, neither at once nor when the phase has its own measure."""
    seen = watch(SETTINGS, noisy(30) + noisy(30, level=6.0), phases=30)
    assert all(recent.since is None for recent in seen)
    assert reached(SETTINGS, noisy(30) + noisy(30, level=6.0)) == 33, "without the phase it would be one"


def test_but_a_spike_may_span_two() -> None:
    recent = watch(SETTINGS, [*noisy(28), NAN, NAN, NAN], phases=30)[-1]
    assert recent.since == 28
    assert should_go_back(SETTINGS, recent, 31)


finite = st.floats(0.5, 12.0, allow_nan=False)


@given(st.lists(finite | st.just(NAN), min_size=1, max_size=60), st.integers(0, 60))
def test_a_resume_anywhere_changes_no_decision(losses: list[float], cut: int) -> None:
    """Whatever a checkpoint holds is enough, and comes back as the same bits."""
    cut = min(cut, len(losses))
    undisturbed = watch(SETTINGS, losses)
    recent = undisturbed[cut - 1] if cut else SpikeHistory()
    for step in range(cut, len(losses)):
        recent = SpikeHistory.from_json(json.loads(json.dumps(recent.to_json(), allow_nan=False)))
        updated = math.isfinite(losses[step])
        recent = next_history(SETTINGS, recent, 0, step, {LOSS: losses[step]}, updated=updated)
        assert recent == undisturbed[step]


@given(st.lists(finite, min_size=8, max_size=40), st.lists(st.just(NAN) | st.just(1e6), min_size=1, max_size=20))
def test_bad_steps_leave_no_trace(good: list[float], bad: list[float]) -> None:
    recent = watch(SETTINGS, good)[-1]
    later = recent
    for step, loss in enumerate(bad, start=len(good)):
        later = next_history(SETTINGS, later, 0, step, {LOSS: loss}, updated=math.isfinite(loss))
    assert later.series == recent.series
    assert later.since == (len(good) if recent.since is None else recent.since)


@given(st.lists(finite, min_size=8, max_size=8), st.floats(1e3, 1e30))
def test_one_outlier_in_the_measure_hardly_moves_the_bound(losses: list[float], outlier: float) -> None:
    """However large, it leaves the bound within what the others' own range explains."""
    losses[losses.index(max(losses))] = outlier
    others = sorted(losses)[:-1]
    spread = max(1.4826 * (others[-1] - others[0]), 0.01 * others[-1])
    assert upper_bound(losses, 8, 5.0) <= others[-1] + 5.0 * spread


def test_the_bound_is_the_median_and_spreads_of_normal_noise() -> None:
    assert upper_bound([1.0, 2.0, 3.0, 4.0, 100.0], 5, 2.0) == pytest.approx(3.0 + 2.0 * 1.4826)
    assert upper_bound([9.0, 9.0, 2.0, 2.0, 2.0, 2.0], 4, 5.0) == pytest.approx(2.0 + 5.0 * 0.02), "only the last four"


def test_an_outlier_makes_no_update() -> None:
    settings = SETTINGS.model_copy(update={"outlier": 20.0})
    recent = SpikeHistory(phase=1, series={"all_grad_norm": (1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1.0)})
    assert 2.0 < max_allowed_figure(settings, recent, 1, "all_grad_norm") < 4.0
    assert max_allowed_figure(settings, recent, 1, "unheard of") == math.inf
    assert max_allowed_figure(settings, recent, 2, "all_grad_norm") == math.inf, "a new phase"
    assert max_allowed_figure(SETTINGS, recent, 1, "all_grad_norm") == math.inf, "not asked for"


def gone_back(began: int, reached: int, to: int | None = 0) -> Rewind:
    return Rewind(
        attempt=1,
        to=None if to is None else CheckpointName(1, to),
        began=began,
        reached=reached,
        cause="",
        skips=(),
    )


HISTORY = [
    CheckpointName(1, 10),
    CheckpointName(2, 40),
    CheckpointName(2, 46),
    CheckpointName(2, 48),
    CheckpointName(2, 52),
]


@pytest.mark.parametrize(
    ("began", "to"), [(53, 48), (50, 46), (49, 46), (48, 40), (43, 40), (42, 10), (13, 10), (55, 52)]
)
def test_back_to_the_newest_checkpoint_well_before_it(began: int, to: int) -> None:
    verdict = decide_after_spike(SETTINGS, began, "a spike", HISTORY, [])
    assert verdict.stop is None
    assert verdict.to is not None
    assert verdict.to.step == to


@pytest.mark.parametrize("history", [[], HISTORY])
def test_without_such_a_checkpoint_the_run_ends(history: list[CheckpointName]) -> None:
    verdict = decide_after_spike(SETTINGS, 12, "losses that are not finite", history, [])
    assert verdict.to is None
    assert isinstance(verdict.stop, StopDecision)
    assert re.search(r"\bfinite, .*\bstep 12\b", verdict.stop.reason)
    assert re.search(r"\bcheckpoint is 3 ", verdict.stop.reason)


@pytest.mark.parametrize(
    ("past", "stops"),
    [
        ([], False),
        ([gone_back(40, 43)], False),
        ([gone_back(40, 43), gone_back(45, 48)], True),
        ([gone_back(45, 48), gone_back(44, 47)], True),  # the second was met on the way back to the first
        ([gone_back(20, 23), gone_back(45, 48)], False),  # long ago: the run had got `window` steps past it
        ([gone_back(36, 39), gone_back(47, 50)], True),
        ([gone_back(38, 41), gone_back(44, 47), gone_back(20, 23)], False),
        ([gone_back(0, 0, None), gone_back(45, 48)], False),  # what was left out from the start is no rewind
    ],
)
def test_it_gives_up_when_going_back_again_and_again_does_not_help(past: list[Rewind], stops: bool) -> None:
    """Two are allowed in a row, each within 8 steps of where the one before had got to."""
    verdict = decide_after_spike(SETTINGS, 53, "a spike", HISTORY, past)
    assert verdict.to == CheckpointName(2, 48), "a later start goes on from there in any case"
    assert (verdict.stop is not None) == stops
    if verdict.stop:
        assert " 2 times" in verdict.stop.reason
        assert "step 48" in verdict.stop.remedy


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (NAN, NAN, "losses that are not finite"),
        (3.0, math.inf, "gradients that are not finite"),
        (9.25, 40.0, "a loss of 9.25 with a gradient norm of 40, after losses of 3"),
    ],
)
def test_the_cause_is_told(loss: float, norm: float, expected: str) -> None:
    recent = replace(watch(SETTINGS, [3.0] * 9)[-1], since=9)
    assert describe_bad_step(recent, loss, norm) == expected


def test_none_may_be_allowed() -> None:
    settings = SETTINGS.model_copy(update={"most_rewinds": 0})
    assert decide_after_spike(settings, 53, "a spike", HISTORY, []).stop is not None
    assert decide_after_spike(SETTINGS, 53, "a spike", HISTORY, []) == SpikeVerdict(CheckpointName(2, 48), None)
