"""The cost of one microbatch of a recipe: FLOPs and memory of its passes, counted by running its module on tensors
without data (`encoder_core.train.counting`). All rows are assumed to be full."""

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
    """The shape of a microbatch of `rows` rows: each has `length` tokens, and `targets_per_row` tokens are predicted.

    Attributes:
        group: number of rows of one example.
        permuted: whether tokens are predicted in a random order (permutation language modelling, XLNet).
        backwards: whether some rows are reversed.
        causal: whether a token attends to earlier tokens only.
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
    """Return the shape of a microbatch of `phase`. `rows`: number of rows, where each text of an example counts as a
    row; None: those of the recipe's microbatch."""
    rows = rows or min(recipe.microbatch_rows(phase), phase.rows_per_step) * recipe.input.texts_per_row
    return shape_of_full_rows(
        recipe_in_phase(recipe, phase), rows, phase.length, targets_per_row_in_phase(recipe, phase)
    )


def shape_of_full_rows(recipe: Recipe, rows: int, length: int, targets: int) -> MicrobatchShape:
    """Return the shape of `rows` rows of `length` tokens with `targets` targets each. `recipe`: the recipe as resolved
    for the rows' phase (`recipe_in_phase`)."""
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
    """Return the mean number of predicted tokens in a row of `phase`."""
    return targets_per_row(recipe_in_phase(recipe, phase), phase.length)


def targets_per_row(recipe: Recipe, length: int) -> int:
    """Return the mean number of predicted tokens in a row, rounded. Special tokens (at the ends of a row and between
    segments) are never masked."""
    maskable = length - (2 if isinstance(recipe.input, PackedInput) else 3)
    return round(recipe.objective.masking.expected_target_count(length, maskable))


def microbatch_cost(
    recipe: Recipe, shape: MicrobatchShape, device: Device = "cuda", *, checkpointing: bool | None = None
) -> PassCost:
    """Return the FLOPs and memory of a microbatch of `shape` on `device`. The recipe must set its vocabulary size.

    `checkpointing`: whether activations are recomputed in the backward pass; None: as the recipe says.
    """
    again = recipe.activation_checkpointing if checkpointing is None else checkpointing
    return objective_cost(recipe.model, recipe.objective, shape, recipe.precision, device, checkpointing=again)


def model_cost(recipe: Recipe, shape: MicrobatchShape) -> PassCost:
    """Return the cost of a microbatch without activation checkpointing: its FLOPs are the "model FLOPs" of MFU."""
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
    """Count the FLOPs and memory of a microbatch of `shape` on `device`. The model must have its vocabulary size."""

    def build_module() -> ObjectiveModule:
        module = objective_module(model, objective, recompute=checkpointing)
        if objective.distil is not None:
            shapes = (source.model for source in objective.distil.teachers)
            vocabulary = {"vocab": model.vocabulary_size}
            hold_teachers(module, [Teacher(its.model_copy(update=vocabulary)) for its in shapes])
        return module

    return count_module_passes(build_module, full_batch(model, objective, shape), _DTYPES[precision], device)


def full_batch(model: ModelConfig, objective: RecipeObjective, shape: MicrobatchShape) -> Batch:
    """Return a batch of `shape` on the host, with every field that `objective` may read. Targets are evenly spaced."""
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
    """Return the corrupted rows that the encoder reads in denoising (BART); None with other objectives."""
    if objective.denoise is None:
        return None
    read = objective.denoise.mean_form_tokens(shape.length)
    return batch_without_targets(torch.zeros(shape.rows * read, dtype=torch.int64), [read] * shape.rows)
