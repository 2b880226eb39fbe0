"""The passes of a recipe's microbatch, counted by running its module without numbers. Rows are full."""

from functools import lru_cache

import torch

from encoder_core.batch import Batch, untargeted
from encoder_core.families.catalogue import ModelConfig, language_table
from encoder_core.objectives.distil import hold_teachers
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.objectives.teacher import Teacher
from encoder_core.train.counting import Counted, count
from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import Device
from launcher.runtime.capacity.workload import Shape
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import RecipeObjective

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@lru_cache(maxsize=64)
def counted_passes(
    model: ModelConfig,
    objective: RecipeObjective,
    shape: Shape,
    precision: Precision,
    device: Device = "cuda",
    *,
    checkpointing: bool = False,
) -> Counted:
    """Count the passes of a microbatch of `shape` on a device of this kind. The model's vocabulary is known."""

    def build() -> ObjectiveModule:
        module = objective_module(model, objective, checkpoint_activations=checkpointing)
        if objective.distil is not None:
            shapes = (source.model for source in objective.distil.teachers)
            vocabulary = {"vocab": model.vocabulary}
            hold_teachers(module, [Teacher(its.model_copy(update=vocabulary)) for its in shapes])
        return module

    return count(build, full_batch(model, objective, shape), _DTYPES[precision], device)


def full_batch(model: ModelConfig, objective: RecipeObjective, shape: Shape) -> Batch:
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
        languages=torch.zeros_like(positions) if language_table(model) else None,
        pair_labels=torch.zeros(rows, dtype=torch.int64),
        order=order if shape.permuted else None,
        reversed_rows=torch.arange(rows) % 2 == 1 if shape.backwards else None,
        group=shape.group,
        rates=torch.full((rows,), 0.5),
        maskable=torch.full((rows,), length),
        causal=shape.causal,
        corrupted=_corrupted(objective, shape),
    )


def _corrupted(objective: RecipeObjective, shape: Shape) -> Batch | None:
    if objective.denoise is None:
        return None
    read = objective.denoise.read(shape.length)
    return untargeted(torch.zeros(shape.rows * read, dtype=torch.int64), [read] * shape.rows)
