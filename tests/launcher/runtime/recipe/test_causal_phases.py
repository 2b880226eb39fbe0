"""Phases of next-token prediction and of masked tokens in one recipe: what each phase is, costs, and cannot be."""

from dataclasses import replace

import pytest

from data_service.samples.masking import MlmMasking
from data_service.samples.next_token import NextToken
from encoder_core.layers.planned import visible_pair_count
from launcher.errors import RecipeError
from launcher.runtime.capacity.workload import microbatch_shape, model_cost
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.phases import recipe_in_phase
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.recipe.timeline import causal_after

LENGTH = 128


def phased(*phases: str, recipe: str = "roberta-base", settings: tuple[str, ...] = ()) -> Recipe:
    each = ", ".join(f"{{steps: 10, length: {LENGTH}, batch: {{sequences: 64}}, {phase}}}" for phase in phases)
    return load(recipe, (f"phases=[{each}]", "schedule.warmup=0", "objective.clm={}", *settings))


BOTH = phased("objective: clm", "objective: mlm, mlm: {rate: 0.4}", "objective: clm")


def test_a_phase_trains_one_of_the_two() -> None:
    assert [set(recipe_in_phase(BOTH, phase).objective.terms) for phase in BOTH.phases] == [
        {"clm"},
        {"mlm"},
        {"clm"},
    ]
    maskings = [recipe_in_phase(BOTH, phase).objective.masking for phase in BOTH.phases]
    assert maskings[0] == maskings[2] == NextToken()
    assert isinstance(maskings[1], MlmMasking)
    assert maskings[1].rate == 0.4
    assert [causal_after(BOTH, steps) for steps in (0, 1, 10, 11, 20, 21, 30)] == [
        True,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert parse_recipe(BOTH.to_yaml(), "printed") == BOTH


def test_only_pairs_in_sight_count_in_causal_phases() -> None:
    """Of 128 tokens in a row 8,256 pairs of 16,384, by products for scores, for values and for the derivatives of both;
    without the head, which scores other tokens."""
    model = with_vocab(BOTH.model)
    recipe = BOTH.model_copy(update={"model": model})
    shapes = [microbatch_shape(recipe, phase) for phase in BOTH.phases[:2]]
    assert [shape.targets_per_row for shape in shapes] == [LENGTH - 3, round(0.4 * (LENGTH - 2))]
    causal, masked = (
        model_cost(recipe_in_phase(recipe, phase), replace(shape, targets_per_row=20)).model
        for phase, shape in zip(BOTH.phases, shapes, strict=False)
    )
    hidden = LENGTH**2 - visible_pair_count(LENGTH, None, causal=True)
    assert masked - causal == 3 * 2 * 2 * hidden * shapes[0].rows * model.hidden * model.layers


REFUSED = {
    "in one step": (("objective: clm", "lr: 1.0e-4"), "roberta-base", ()),
    "masks where nothing is hidden": (("objective: clm, mlm: {rate: 0.4}",), "roberta-base", ()),
    "a weight of what is not trained": (("objective: clm, weights: {mlm: 2}",), "roberta-base", ()),
    "a choice between one": (("objective: mlm",), "roberta-base", ("objective.mlm=null",)),
    "two streams": (("lr: 1.0e-4",), "xlnet-base", ()),
    "a mask decoder": (("objective: clm",), "deberta-base", ()),
    "a generator": (("objective: clm",), "deberta-v3-base", ()),
    "vectors": (("lr: 1.0e-4",), "contrastive-base", ()),
}


@pytest.mark.parametrize(("phases", "recipe", "settings"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused(phases: tuple[str, ...], recipe: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        phased(*phases, recipe=recipe, settings=settings)
    assert "clm" in caught.value.problem


def test_clm_alone_needs_no_choice() -> None:
    alone = phased("lr: 1.0e-4", settings=("objective.mlm=null",))
    assert alone.objective.masking == NextToken()
    assert causal_after(alone, 10)
