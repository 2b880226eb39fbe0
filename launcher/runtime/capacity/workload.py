"""One microbatch of a recipe: its rows and targets, and its passes, counted by running its module without numbers.

Rows count as full.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from data_service.samples.lanes import Lanes
from data_service.samples.packing import PackedInput
from encoder_core.batch import Batch, batch_without_targets
from encoder_core.families.catalogue import ModelConfig, embedded_languages
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.train.counting import PassCost, count_module_passes
from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import Device
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.phases import recipe_in_phase
from launcher.runtime.recipe.schema import Recipe, RecipePhase

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MicrobatchShape:
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


def microbatch_shape(recipe: Recipe, phase: RecipePhase, rows: int | None = None) -> MicrobatchShape:
    """Return the shape of a microbatch of a phase with so many rows; None: a full one. Each text of an example counts
    as a row."""
    rows = rows or min(recipe.microbatch_rows(phase), phase.rows_per_step) * recipe.input.texts_per_row
    return shape_of_full_rows(
        recipe_in_phase(recipe, phase), rows, phase.length, targets_per_row_in_phase(recipe, phase)
    )


def shape_of_full_rows(recipe: Recipe, rows: int, length: int, targets: int) -> MicrobatchShape:
    """Return the shape of `rows` rows of the recipe's kind, with `length` tokens and `targets` targets each. `recipe`:
    as it is in the rows' phase."""
    lanes = recipe.input if isinstance(recipe.input, Lanes) else None
    return MicrobatchShape(
        rows,
        length,
        targets,
        group=recipe.input.texts_per_row,
        permuted=lanes is not None,
        backwards=lanes is not None and lanes.both_directions,
        causal=recipe.objective.causal,
    )


def targets_per_row_in_phase(recipe: Recipe, phase: RecipePhase) -> int:
    """Return the number of targets of a row under the phase's masking."""
    return targets_per_row(recipe_in_phase(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """Return the mean number of targets of a row, rounded. Special tokens, at a row's ends and between segments, are
    not masked."""
    maskable = length - (2 if isinstance(recipe.input, PackedInput) else 3)
    return round(recipe.objective.masking.expected_target_count(length, maskable))


def microbatch_cost(
    recipe: Recipe, shape: MicrobatchShape, device: Device = "cuda", *, checkpointing: bool | None = None
) -> PassCost:
    """Return the passes of a microbatch of `shape` on a device of this kind. The recipe's vocabulary is known.

    `checkpointing`: whether layers are computed again in the backward pass; None: as the recipe says.
    """
    again = recipe.activation_checkpointing if checkpointing is None else checkpointing
    return objective_cost(recipe.model, recipe.objective, shape, recipe.precision, device, checkpointing=again)


def model_cost(recipe: Recipe, shape: MicrobatchShape) -> PassCost:
    """Return the passes of a microbatch of which nothing is computed again: their FLOPs are the model's."""
    return microbatch_cost(recipe, shape, checkpointing=False)


@lru_cache(maxsize=64)
def objective_cost(
    model: ModelConfig,
    objective: RecipeObjective,
    shape: MicrobatchShape,
    precision: Precision,
    device: Device = "cuda",
    *,
    checkpointing: bool = False,
) -> PassCost:
    """Count the passes of a microbatch of `shape` on a device of this kind. The model's vocabulary is known."""

    def build_module() -> ObjectiveModule:
        module = objective_module(model, objective, recompute=checkpointing)
        if objective.distil is not None:
            shapes = (source.model for source in objective.distil.teachers)
            vocabulary = {"vocab": model.vocabulary_size}
            hold_teachers(module, [Teacher(its.model_copy(update=vocabulary)) for its in shapes])
        return module

    return count_module_passes(build_module, full_batch(model, objective, shape), _DTYPES[precision], device)


def full_batch(model: ModelConfig, objective: RecipeObjective, shape: MicrobatchShape) -> Batch:
    """Return rows of `shape` on the host, with every column that an objective may read. Targets are spread evenly."""
    rows, length, each = shape.rows, shape.length, shape.targets_per_row
    positions = torch.arange(length).repeat(rows)
    places = (2 * torch.arange(each) + 1) * length // max(1, 2 * each)
    targets = (torch.arange(rows)[:, None] * length + places).flatten()
    segments = (positions >= length // 2).long()
    if shape.permuted:
        segments[positions == length - 1] = 2
    order = torch.zeros_like(positions).index_fill(0, targets, 1)
    return Batch(
        tokens=torch.zeros_like(positions),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32) * length,
        max_length=length,
        positions=positions,
        target_positions=targets,
        target_ids=torch.zeros_like(targets),
        segments=segments,
        languages=torch.zeros_like(positions) if embedded_languages(model) else None,
        pair_labels=torch.zeros(rows, dtype=torch.int64),
        order=order if shape.permuted else None,
        reversed_rows=torch.arange(rows) % 2 == 1 if shape.backwards else None,
        group=shape.group,
        rates=torch.full((rows,), 0.5),
        maskable=torch.full((rows,), length),
        causal=shape.causal,
        corrupted=_corrupted_batch(objective, shape),
    )


def _corrupted_batch(objective: RecipeObjective, shape: MicrobatchShape) -> Batch | None:
    if objective.denoise is None:
        return None
    read = objective.denoise.mean_form_tokens(shape.length)
    return batch_without_targets(torch.zeros(shape.rows * read, dtype=torch.int64), [read] * shape.rows)
