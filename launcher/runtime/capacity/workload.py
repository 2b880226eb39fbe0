"""What one microbatch of a recipe is to the counts of `encoder_core/cost`: its rows, targets, terms of the loss.

Rows are taken as full.
"""

from data_service.samples.lanes import Lanes
from data_service.samples.packing import Packed
from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Count, Product, Shape, count
from encoder_core.cost.saved import Kernel
from encoder_core.objectives.compose import activations, first_pass, products
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import Recipe, RecipePhase


def microbatch_shape(recipe: Recipe, phase: RecipePhase) -> Shape:
    """Return each text of an example counted as a row."""
    rows = min(recipe.microbatch_of(phase), phase.rows) * recipe.input.texts
    return full_rows(recipe, rows, phase.length, phase_targets(recipe, phase))


def full_rows(recipe: Recipe, rows: int, length: int, targets: int) -> Shape:
    """So many rows of the recipe's kind, with so many targets each."""
    backwards = isinstance(recipe.input, Lanes) and recipe.input.both_directions
    return Shape(rows, length, targets, backwards)


def phase_targets(recipe: Recipe, phase: RecipePhase) -> int:
    """Targets of a row, under the phase's masks."""
    return targets_per_row(during(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """Return the mean, to the nearest whole: of a row's tokens but for the special ones at its ends (and between
    segments)."""
    maskable = length - (2 if isinstance(recipe.input, Packed) else 3)
    return round(recipe.objective.masking.expected(length, maskable))


def microbatch_products(recipe: Recipe, shape: Shape) -> list[Product]:
    """Everything that one microbatch of `shape` multiplies."""
    return products(recipe.model, recipe.objective.terms, shape)


def microbatch_flops(recipe: Recipe, shape: Shape) -> Count:
    return count(microbatch_products(recipe, shape))


def microbatch_activations(recipe: Recipe, shape: Shape, kernel: Kernel = "gpu") -> list[Activations]:
    """Return what is kept for the backward pass, for each update group of a step. `kernel`: see
    `encoder_core.cost.saved`."""
    return activations(recipe.model, recipe.objective.terms, shape, kernel)


def executed(recipe: Recipe, shape: Shape) -> int:
    """FLOPs of a microbatch with what runs once more: layers under activation checkpointing, and a contrastive step's
    first pass (encoder_core/objectives/contrastive.py)."""
    flops = microbatch_flops(recipe, shape)
    again = flops.recomputed if recipe.activation_checkpointing else 0
    return flops.model + again + vectors_flops(recipe, shape)


def vectors_flops(recipe: Recipe, shape: Shape) -> int:
    """Of the first pass of a contrastive step's microbatch; 0 of other steps."""
    return first_pass(recipe.model, recipe.objective.terms, shape)
