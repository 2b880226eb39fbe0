"""What fills a rank's memory: what is there all the time, and what a microbatch adds."""

from math import prod

from encoder_core.cost.products import Shape
from encoder_core.cost.saved import Kernel
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.compose import chunk_of_logits
from encoder_core.train import zero_memory as memory
from encoder_core.train.engine_config import BUCKET
from encoder_core.train.zero_memory import MemoryPart, Stage
from launcher.runtime.capacity.workload import microbatch_activations
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import largest_parameter, momentum_matrices, teacher_parameters


def bill(
    recipe: Recipe,
    count: int,
    ranks: int,
    stage: Stage,
    *,
    shape: Shape,
    rounds: int,
    kernel: Kernel = "gpu",
    bucket: int = BUCKET,
) -> tuple[MemoryPart, ...]:
    """What fills the memory of one of `ranks` that train `count` parameters, `rounds` microbatches of `shape` a step.

    `kernel`, `bucket`: as in `encoder_core.cost.saved` and `memory.kept`.
    """
    added = memory.of_microbatch(
        microbatch_activations(recipe, shape, kernel),
        recipe.precision,
        checkpointed=recipe.activation_checkpointing,
        logits=chunk_of_logits(recipe.model, recipe.objective.terms, shape, kernel),
    )
    return (*kept(recipe, count, ranks, stage, rows=shape.rows * rounds, bucket=bucket), *added)


def kept(
    recipe: Recipe, count: int, ranks: int, stage: Stage, *, rows: int, bucket: int = BUCKET
) -> list[MemoryPart]:
    """What of a `bill` is there all the time. `rows`: of a rank in a step."""
    single = sum(prod(shape) for shape in momentum_matrices(recipe))
    parts = memory.kept(
        count,
        ranks,
        stage,
        recipe.precision,
        recipe.reduce_dtype,
        bucket=bucket,
        single=single,
        largest=largest_parameter(recipe),
    )
    taught = teacher_parameters(recipe)
    if taught:
        parts.append(memory.frozen(taught, recipe.precision))
    if isinstance(recipe.model, XlnetConfig) and recipe.memory_refresh is not None:
        parts.append(_remembered(recipe.model, rows, recipe.precision))
    return parts


def _remembered(model: XlnetConfig, rows: int, precision: str) -> MemoryPart:
    """Of all microbatches of a rank."""
    state = 2 if precision == "bf16" else 4
    formula = f"{state} B x {rows} rows x {model.memory} tokens x {model.hidden} x {model.layers} layers"
    numbers = rows * model.memory * model.hidden * model.layers
    return MemoryPart("memory of earlier tokens", formula, state * numbers)
