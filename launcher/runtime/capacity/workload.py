"""One microbatch of a recipe: its rows and targets, and what it computes. Rows count as full."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_service.samples.lanes import Lanes
from data_service.samples.packing import Packed
from encoder_core.train.zero_memory import Device
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import Recipe, RecipePhase

if TYPE_CHECKING:
    from encoder_core.train.counting import Counted


@dataclass(frozen=True)
class Shape:
    """The shape of a microbatch: every row has `length` tokens, of which `targets_per_row` are predicted.

    Attributes:
        group: number of rows of one example.
        permuted: whether tokens are predicted in an order of their own. backwards: whether some rows are read from
            their ends.
        causal: whether tokens see no later token.
    """

    rows: int
    length: int
    targets_per_row: int
    group: int = 1
    permuted: bool = False
    backwards: bool = False
    causal: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def microbatch_shape(recipe: Recipe, phase: RecipePhase) -> Shape:
    """Return the shape of a full microbatch of a phase. Each text of an example counts as a row."""
    rows = min(recipe.microbatch_of(phase), phase.rows) * recipe.input.texts
    return full_rows(during(recipe, phase), rows, phase.length, phase_targets(recipe, phase))


def full_rows(recipe: Recipe, rows: int, length: int, targets: int) -> Shape:
    """Return the shape of `rows` rows of the recipe's kind, with `length` tokens and `targets` targets each. `recipe`:
    as it is in the rows' phase."""
    lanes = recipe.input if isinstance(recipe.input, Lanes) else None
    return Shape(
        rows,
        length,
        targets,
        group=recipe.input.texts,
        permuted=lanes is not None,
        backwards=lanes is not None and lanes.both_directions,
        causal=recipe.objective.causal,
    )


def phase_targets(recipe: Recipe, phase: RecipePhase) -> int:
    """Return the number of targets of a row under the phase's masking."""
    return targets_per_row(during(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """Return the mean number of targets of a row, rounded. Special tokens, at a row's ends and between segments, are
    not masked."""
    maskable = length - (2 if isinstance(recipe.input, Packed) else 3)
    return round(recipe.objective.masking.expected(length, maskable))


def counted(
    recipe: Recipe, shape: Shape, device: Device = "cuda", *, checkpointing: bool | None = None
) -> "Counted":
    """Return the passes of a microbatch of `shape` on a device of this kind. The recipe's vocabulary is known.

    `checkpointing`: whether layers are computed again in the backward pass; None: as the recipe says.
    """
    from launcher.runtime.capacity.passes import counted_passes  # torch, which shapes do not need

    again = recipe.activation_checkpointing if checkpointing is None else checkpointing
    return counted_passes(
        recipe.model, recipe.objective, shape, recipe.precision, device, checkpointing=again
    )


def microbatch_flops(recipe: Recipe, shape: Shape) -> "Counted":
    """Return the passes of a microbatch of which nothing is computed again: their FLOPs are the model's."""
    return counted(recipe, shape, checkpointing=False)


def executed(recipe: Recipe, shape: Shape) -> int:
    """Return the FLOPs of a microbatch, including those that run twice: layers under activation checkpointing, and the
    first pass of a contrastive step (encoder_core/objectives/contrastive.py)."""
    found = counted(recipe, shape)
    return found.model + found.first_pass
