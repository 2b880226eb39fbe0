"""What one microbatch of a recipe is to the counts of `encoder_core/cost`: its rows, targets, terms of the loss.

Rows are taken as full.
"""

import math

from data_service.samples.lanes import Lanes
from data_service.samples.packing import Packed
from encoder_core.cost.activations import Activations, of_update_groups
from encoder_core.cost.flops import Distilled, ObjectiveTerms, first_pass, products
from encoder_core.cost.products import Count, Product, Shape, count
from encoder_core.cost.saved import Kernel
from encoder_core.objectives.distil import DistilConfig, HiddenConfig
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import Recipe, RecipePhase


def microbatch_shape(recipe: Recipe, phase: RecipePhase) -> Shape:
    """Each text of an example counted as a row."""
    rows = min(recipe.microbatch_of(phase), phase.rows) * recipe.input.texts
    return Shape(rows, phase.length, phase_targets(recipe, phase))


def phase_targets(recipe: Recipe, phase: RecipePhase) -> int:
    """Targets of a row, under the phase's masks."""
    return targets_per_row(during(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """The mean, to the nearest whole: of a row's tokens but for the special ones at its ends (and between segments)."""
    return round(_targets(recipe.objective, length, length - (2 if isinstance(recipe.input, Packed) else 3)))


def _targets(objective: RecipeObjective, length: int, maskable: int) -> float:
    if objective.plm is not None:
        return objective.plm.predict
    if objective.mlm is None:  # contrastive
        return 0
    wanted = objective.mlm.rate * (length if objective.mlm.count_special else maskable)
    if objective.mlm.count == "drawn":  # with replacement, each counted once
        wanted = maskable * (1 - (1 - 1 / maskable) ** wanted)
    if objective.mlm.count == "ceil":
        wanted = math.ceil(wanted)
    most = objective.mlm.max_predictions
    return wanted if most is None else min(wanted, most)


def terms(objective: RecipeObjective) -> ObjectiveTerms:
    """What of an objective decides what is computed."""
    return ObjectiveTerms(
        pairs=objective.nsp is not None or objective.sop is not None,
        span_boundary=objective.sbo is not None,
        replaced=objective.rtd,
        contrastive=objective.contrastive,
        beside=objective.contrastive is not None and objective.mlm is not None,
        distilled=None if objective.distil is None else _distilled(objective.distil, objective.hidden),
    )


def _distilled(distil: DistilConfig, hidden: HiddenConfig | None) -> Distilled:
    teachers = tuple(teacher.model for teacher in distil.teachers)
    if hidden is None:
        return Distilled(teachers, distil.places == "all")
    return Distilled(teachers, distil.places == "all", layers=True, projection=hidden.projection)


def microbatch_products(recipe: Recipe, shape: Shape) -> list[Product]:
    """Everything that one microbatch of `shape` multiplies."""
    return products(recipe.model, terms(recipe.objective), shape, backwards=_reads_backwards(recipe))


def microbatch_flops(recipe: Recipe, shape: Shape) -> Count:
    return count(microbatch_products(recipe, shape))


def microbatch_activations(recipe: Recipe, shape: Shape, kernel: Kernel = "gpu") -> list[Activations]:
    """What is kept for the backward pass, for each update group of a step. `kernel`: see `encoder_core.cost.saved`."""
    return of_update_groups(
        recipe.model, terms(recipe.objective), shape, kernel, backwards=_reads_backwards(recipe)
    )


def _reads_backwards(recipe: Recipe) -> bool:
    """Whether some rows are read from their ends."""
    return isinstance(recipe.input, Lanes) and recipe.input.both_directions


def executed(recipe: Recipe, shape: Shape) -> int:
    """FLOPs of a microbatch with what runs once more: layers under activation checkpointing, and a contrastive step's
    first pass (encoder_core/objectives/contrastive.py)."""
    flops = microbatch_flops(recipe, shape)
    again = flops.recomputed if recipe.activation_checkpointing else 0
    return flops.model + again + vectors_flops(recipe, shape)


def vectors_flops(recipe: Recipe, shape: Shape) -> int:
    """Of the first pass of a contrastive step's microbatch; 0 of other steps."""
    return first_pass(recipe.model, terms(recipe.objective), shape)
