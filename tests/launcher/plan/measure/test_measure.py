"""What follows from measured parts for the recipe's own step, for the whole run, and for an estimate."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.estimate.estimate import estimate
from launcher.plan.estimate.render import render as render_estimate
from launcher.plan.estimate.roofline import step_share
from launcher.plan.measure.measure import MeasuredPhase, MeasuredRecipe, correction, utilisations, whole_step
from launcher.plan.measure.render import figures, render
from launcher.plan.measure.requests import Step
from launcher.plan.measure.trial import Machine, Trial, choose
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.capacity.workload import microbatch_shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import parameters

PEAK = 989e12
H100 = Machine(8, "cuda", "NVIDIA H100 80GB HBM3", 1, 1 << 50, PEAK, find_gpu("H100"))


def step_of(trial: Trial, *, each: float, once: float, data: float) -> Step:
    """A step whose microbatches take `each`, a third of it forward; the last exchange and the update take `once`."""
    passes, update = trial.rounds * each, once / 2
    last = each * 2 / 3 + once / 2
    backward = passes * 2 / 3 + once / 2
    seconds = passes + once + data
    tokens = 1000 * trial.rounds
    return Step(seconds, data, passes / 3, backward, last, update, tokens)


def measured(recipe: Recipe, trial: Trial, step: Step) -> MeasuredPhase:
    return MeasuredPhase(
        phase=recipe.phases[0],
        trial=trial,
        step=step,
        low=step.seconds * 0.9,
        high=step.seconds * 1.1,
        steps=7,
        peak_bytes=trial.bytes + 1,
        peak_flops=PEAK,
        mfu=0.4,
        exchange=0.1,
        operators=(("mm", 0.6), ("copy_", 0.2)),
        whole=whole_step(recipe, recipe.phases[0], trial, step),
        estimated=2.0,
    )


def report(recipe: Recipe, step_seconds: float = 0.5) -> MeasuredRecipe:
    trial = choose(recipe, recipe.phases[0], H100)
    step = step_of(trial, each=step_seconds / trial.rounds, once=0.1, data=0.0)
    return MeasuredRecipe(recipe, H100, parameters(recipe), (measured(recipe, trial, step),))


@pytest.mark.long
@pytest.mark.heavy
@settings(deadline=None, max_examples=30)
@given(
    each=st.floats(1e-3, 10),
    once=st.floats(0, 10),
    data=st.floats(0, 1),
    zero=st.sampled_from((1, 2)),
    rounds=st.integers(2, 40),
)
def test_a_step_of_more_microbatches_follows_from_two(
    each: float, once: float, data: float, zero: int, rounds: int
) -> None:
    """At stage 2 every backward pass exchanges, so nothing of it comes once."""
    rows = 8 * 64 * rounds
    recipe = load("roberta-base", (f"zero={zero}", f"phases.0.batch.sequences={rows}", "microbatch=64"))
    trial = choose(recipe, recipe.phases[0], H100)
    assert (trial.rounds, trial.whole) == (2, rounds)
    found = whole_step(recipe, recipe.phases[0], trial, step_of(trial, each=each, once=once, data=data))
    if zero == 1 or rounds == 2:
        assert found == pytest.approx(rounds * each + once + data)
    else:
        assert found >= rounds * each + data


@pytest.mark.long
def test_fewer_rows_and_layers_are_scaled_by_flops_and_parameters() -> None:
    recipe = load("roberta-base", ("microbatch=64", "phases.0.batch.sequences=512"))
    slow = replace(H100, peak=1e9)
    trial = choose(recipe, recipe.phases[0], slow)
    assert trial.smaller == ("1 of the microbatch's 64 rows", "1 of 12 layers")
    found = whole_step(recipe, recipe.phases[0], trial, step_of(trial, each=1.0, once=0.0, data=0.0))
    assert 64 * 2 < found < 64 * 12, "the head and the embeddings are not twelve times as large"


def test_what_was_measured_whole_is_left_as_it_is() -> None:
    recipe = load("roberta-base", ("phases.0.batch.sequences=512", "microbatch=64"))
    trial = choose(recipe, recipe.phases[0], H100)
    step = step_of(trial, each=0.2, once=0.1, data=0.3)
    assert whole_step(recipe, recipe.phases[0], trial, step) == step.seconds


@pytest.mark.long
def test_the_estimate_of_this_machine_goes_by_the_step() -> None:
    recipe = load("roberta-base")
    found = report(recipe)
    here = Cluster(1, 8, find_gpu("H100"), mtbf=1e12)
    corrected = estimate(recipe, here, measured=utilisations(found, here))
    assert sum(phase.seconds for phase in corrected.phases) == pytest.approx(found.seconds)
    assert "utilisation, measured" in render_estimate(corrected)


@pytest.mark.long
def test_the_estimate_of_more_such_machines_goes_by_the_share() -> None:
    recipe = load("roberta-base")
    found = report(recipe)
    larger = Cluster(4, 8, find_gpu("H100"), mtbf=1e12)
    corrected = estimate(recipe, larger, measured=utilisations(found, larger))
    assert corrected.phases[0].network > 0
    assert corrected.phases[0].utilisation.measured
    faster = report(recipe, step_seconds=0.25)
    sooner = estimate(recipe, larger, measured=utilisations(faster, larger))
    assert sooner.phases[0].compute < corrected.phases[0].compute


def test_another_gpu_is_judged_by_what_was_found_of_what_was_assumed_here() -> None:
    """Two thirds of the time that was measured: three halves of the share, there as here."""
    recipe, there = load("roberta-base"), Cluster(1, 8, find_gpu("A100-80"), mtbf=1e12)
    found = report(recipe)
    assert found.machine.gpu is not None
    (share,) = utilisations(found, there)
    ratio = correction(found.phases[0], found.machine.gpu)
    (phase,) = found.phases
    shape = microbatch_shape(recipe, recipe.phases[0])
    assumed = step_share(recipe, shape, find_gpu("A100-80"), phase.trial.whole)
    assert share.share == pytest.approx(min(1.0, ratio * assumed), rel=1e-6)
    assert f"x {ratio:.2f}" in share.source
    assert not share.measured


def test_where_no_gpu_was_measured_nothing_is_corrected() -> None:
    found = replace(report(load("roberta-base")), machine=replace(H100, device="cpu", gpu=None))
    assert not utilisations(found, Cluster(1, 8, find_gpu("L4"), mtbf=1e12))


@pytest.mark.long
def test_the_text_says_what_was_measured_and_what_follows() -> None:
    found = report(load("roberta-base"))
    text = render(found)
    for shown in (
        "median of 7",
        "40.0%",
        "mm 60%",
        "exchange between ranks",
        "scaled up by FLOPs",
        "expected",
    ):
        assert shown in text
    phases: Any = figures(found)["phases"]
    (phase,) = phases
    assert sum(phase["parts"].values()) == pytest.approx(phase["step_seconds"]["median"])
