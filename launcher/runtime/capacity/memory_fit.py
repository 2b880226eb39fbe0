"""The parts of a rank's memory, constant ones and those of a microbatch, and the number of rows of a microbatch that
fits: `microbatch: auto` begins with that number."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from encoder_core.cost.products import Shape
from encoder_core.cost.saved import Kernel
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import Recurrence
from encoder_core.terms.composition import chunk_of_logits
from encoder_core.train import zero_memory as memory
from encoder_core.train.settings import BUCKET
from encoder_core.train.zero_memory import MemoryPart, Stage
from launcher.runtime.capacity.workload import microbatch_activations, microbatch_shape
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import (
    known,
    largest_parameter,
    momentum_matrices,
    parameters,
    teacher_parameters,
)


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
    """Return the parts of the memory of one of `ranks` that train `count` parameters with `rounds` microbatches of
    `shape` in a step.

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
    """Return the parts of a `bill` that are filled all the time. `rows`: number of a rank's rows in a step."""
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
    if recipe.model.recurrence is not None and recipe.memory_refresh is not None:
        parts.append(_cache(recipe.model, recipe.model.recurrence, rows, recipe.precision))
    return parts


def _cache(model: ModelConfig, cache: Recurrence, rows: int, precision: str) -> MemoryPart:
    """Return the part for the cached states of earlier rows, of all microbatches of a rank."""
    state = 2 if precision == "bf16" else 4
    formula = f"{state} B x {rows} rows x {cache.length} tokens x {model.hidden} x {model.layers} layers"
    numbers = rows * cache.length * model.hidden * model.layers
    return MemoryPart("memory of earlier tokens", formula, state * numbers)


CPU_TOKENS = 8192
"""Number of tokens of a microbatch on a CPU, where more tokens are no faster. Measured with one thread, 2 layers of
256, rows of 128: 3.9k tokens/s with 1 row, 5.5k with 16, 6.0k with 64, 5.4k with 128; with 2 layers of 768, rows of
512: 0.8k with 1 row, 1.0k from 4 on."""


Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Bill:
    """The memory of one of `ranks` that train a recipe whose vocabulary is known, on a kind of device."""

    recipe: Recipe
    parameters: int
    ranks: int
    device: Device

    @classmethod
    def of(cls, recipe: Recipe, ranks: int, device: Device, vocabulary: int | None = None) -> "Bill":
        """Return the bill of a recipe. `vocabulary`: the tokenizer's size, for a recipe without a vocabulary size of
        its own. Parameters are counted on a module without memory."""
        if vocabulary is not None and recipe.model.vocab is None:
            recipe = recipe.model_copy(
                update={"model": recipe.model.model_copy(update={"vocab": vocabulary})}
            )
        sized = recipe.model_copy(update={"model": known(recipe.model)})
        return cls(sized, parameters(sized), ranks, device)

    def kept(self, phase: RecipePhase) -> int:
        """Return the bytes that are filled all the time."""
        rows = -(-phase.rows // self.ranks) * self.recipe.input.texts
        zero, bucket = self.recipe.zero, self._bucket
        parts = kept(self.recipe, self.parameters, self.ranks, zero, rows=rows, bucket=bucket)
        return memory.total(parts)

    def with_rows(self, phase: RecipePhase, rows: int) -> int:
        """Return the largest number of bytes that are filled with microbatches of `rows` rows."""
        parts = bill(
            self.recipe,
            self.parameters,
            self.ranks,
            self.recipe.zero,
            shape=replace(microbatch_shape(self.recipe, phase), rows=rows * self.recipe.input.texts),
            rounds=-(-phase.rows // (rows * self.ranks)),
            kernel="gpu" if self.device == "cuda" else "cpu",
            bucket=self._bucket,
        )
        return memory.total(parts)

    @property
    def _bucket(self) -> int:
        return BUCKET if self.device == "cuda" else min(BUCKET, self.parameters)


def rows_that_fit(bill: Bill, room: int) -> list[int]:
    """Return, for each phase, the largest number of rows of a microbatch that fits into `room` bytes and makes a step
    faster; at least 1."""
    return [
        _most(_useful(bill, phase), lambda rows, phase=phase: bill.with_rows(phase, rows) <= room)  # type: ignore[misc]
        for phase in bill.recipe.phases
    ]


def _useful(bill: Bill, phase: RecipePhase) -> int:
    """Return the number of rows above which a larger microbatch has no use: a rank's rows of a step; on a CPU at most
    those of `CPU_TOKENS`."""
    part = -(-phase.rows // bill.ranks)
    if bill.device == "cuda":
        return part
    return max(1, min(part, CPU_TOKENS // (phase.length * bill.recipe.input.texts)))


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, by bisection; 1 if none fits."""
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
