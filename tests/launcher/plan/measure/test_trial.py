"""How much of a recipe is measured on a machine: never more than fits, and less is said to be less."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import EstimateError
from launcher.plan.measure.measure import announcement
from launcher.plan.measure.trial import STEP_S, Machine, choose, this_machine
from launcher.runtime.recipe.checks import impossible
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny

NARROW = ("model.layers=6", "model.hidden=64", "model.heads=2", "model.feed_forward=128")
RECIPES = [
    load(name, NARROW)
    for name in ("roberta-base", "xlnet-base", "albert-base", "deberta-base-sop", "simcse-base")
]


def machine(ranks: int = 2, memory: int = 1 << 50, peak: float | None = 1e20) -> Machine:
    return Machine(ranks, "cpu", "a CPU", 1, memory, peak, None)


@pytest.mark.parametrize("name", list(bundled()))
def test_a_large_machine_measures_the_recipes_own_microbatch(name: str) -> None:
    """Every recipe's batches, through a small model, which is counted sooner."""
    recipe = load(name)
    small = tiny(recipe)
    model = small.model.model_copy(update={"max_length": recipe.model.max_length})
    recipe = recipe.model_copy(update={"model": model, "objective": small.objective})
    for phase in recipe.phases:
        trial = choose(recipe, phase, machine())
        assert not trial.smaller
        assert trial.recipe.microbatch == min(recipe.microbatch_of(phase), phase.rows)
        assert trial.whole == math.ceil(math.ceil(phase.rows / recipe.microbatch_of(phase)) / 2)
        assert trial.rounds == min(2, trial.whole)
        assert trial.recipe.phases[0].rows == trial.recipe.microbatch * trial.rounds * 2


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(
    recipe=st.sampled_from(RECIPES),
    ranks=st.integers(1, 8),
    memory=st.integers(24, 36).map(lambda power: 1 << power),
    peak=st.none() | st.integers(6, 15).map(lambda power: 10.0**power),
)
def test_what_is_measured_fits(recipe: Recipe, ranks: int, memory: int, peak: float | None) -> None:
    here = machine(ranks, memory, peak)
    try:
        trial = choose(recipe, recipe.phases[0], here)
    except EstimateError:
        slowest = machine(ranks, 1 << 50, 1.0)  # of which the smallest trial is taken
        assert choose(recipe, recipe.phases[0], slowest).bytes > memory
        return
    assert trial.bytes <= memory
    assert not impossible(trial.recipe)
    said = announcement(recipe.phases[0], trial, here)
    assert all(what in said for what in trial.smaller)
    whole_rows = trial.recipe.microbatch == min(recipe.microbatch, recipe.phases[0].rows)
    whole_layers = trial.recipe.model.layers == recipe.model.layers
    assert (whole_rows and whole_layers) == (not trial.smaller)
    assert trial.recipe.microbatch != "auto"
    assert whole_layers or trial.recipe.microbatch <= 2, "rows go before layers"
    if trial.seconds is not None and trial.seconds > STEP_S:
        assert trial.recipe.model.layers == 1, "what takes too long is made as small as it can be"


def test_a_machine_without_memory_is_told_what_is_missing() -> None:
    recipe = RECIPES[0]
    with pytest.raises(EstimateError, match=r"\b1 of 6 layers\b.*\brank\b") as raised:
        choose(recipe, recipe.phases[0], machine(memory=1 << 20))
    assert "--tiny" in raised.value.remedy


@pytest.mark.long
def test_a_step_on_this_machine_is_foreseen() -> None:
    """On a CPU too: else a large recipe would be measured as it is, for hours."""
    here = this_machine(load("bert-large"))
    trial = choose(load("bert-large"), load("bert-large").phases[0], here)
    assert trial.seconds is not None
    assert 0 < trial.seconds <= STEP_S or trial.recipe.microbatch == 1
