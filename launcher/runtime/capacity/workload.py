"""One microbatch of a recipe in the terms of `encoder_core/cost`: its rows, targets, terms of the loss.

Rows count as full.
"""

from collections.abc import Mapping

from data_service.samples.lanes import Lanes
from data_service.samples.packing import Packed
from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Count, Product, Shape, count
from encoder_core.cost.saved import Kernel
from encoder_core.terms.composition import activations, first_pass, products
from encoder_core.terms.term import TermConfig
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import Recipe, RecipePhase


def microbatch_shape(recipe: Recipe, phase: RecipePhase) -> Shape:
    """Return the shape of a full microbatch of a phase. Each text of an example counts as a row."""
    rows = min(recipe.microbatch_of(phase), phase.rows) * recipe.input.texts
    return full_rows(during(recipe, phase), rows, phase.length, phase_targets(recipe, phase))


def full_rows(recipe: Recipe, rows: int, length: int, targets: int) -> Shape:
    """Return the shape of `rows` rows of the recipe's kind, with `length` tokens and `targets` targets each. `recipe`:
    as it is in the rows' phase."""
    backwards = isinstance(recipe.input, Lanes) and recipe.input.both_directions
    return Shape(rows, length, targets, backwards, recipe.objective.causal)


def phase_targets(recipe: Recipe, phase: RecipePhase) -> int:
    """Return the number of targets of a row under the phase's masking."""
    return targets_per_row(during(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """Return the mean number of targets of a row, rounded. Special tokens, at a row's ends and between segments, are
    not masked."""
    maskable = length - (2 if isinstance(recipe.input, Packed) else 3)
    return round(recipe.objective.masking.expected(length, maskable))


def microbatch_products(recipe: Recipe, shape: Shape) -> list[Product]:
    """Return all matrix products of one microbatch of `shape`."""
    return products(recipe.model, _terms(recipe, shape), shape)


def microbatch_flops(recipe: Recipe, shape: Shape) -> Count:
    return count(microbatch_products(recipe, shape))


def microbatch_activations(recipe: Recipe, shape: Shape, kernel: Kernel = "gpu") -> list[Activations]:
    """Return the activations that are kept for the backward pass, for each update group of a step. `kernel`: as in
    `encoder_core.cost.saved`."""
    return activations(recipe.model, _terms(recipe, shape), shape, kernel)


def _terms(recipe: Recipe, shape: Shape) -> Mapping[str, TermConfig]:
    """Return the terms that are trained on rows of this shape."""
    return recipe.objective.on(causal=shape.causal).terms


def executed(recipe: Recipe, shape: Shape) -> int:
    """Return the FLOPs of a microbatch, including computations that run twice: layers under activation checkpointing,
    and the first pass of a contrastive step (encoder_core/objectives/contrastive.py)."""
    flops = microbatch_flops(recipe, shape)
    again = flops.recomputed if recipe.activation_checkpointing else 0
    return flops.model + again + vectors_flops(recipe, shape)


def vectors_flops(recipe: Recipe, shape: Shape) -> int:
    """Return the FLOPs of the first pass of a contrastive step's microbatch; 0 for other steps."""
    return first_pass(recipe.model, recipe.objective.terms, shape)
