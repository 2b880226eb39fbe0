"""Predicts a rank's memory (a fixed part and a part for each microbatch), and the largest microbatch that fits, with
which `microbatch: auto` begins."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import prod

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import Recurrence
from encoder_core.train import zero_memory as memory
from encoder_core.train.settings import BUCKET_SIZE
from encoder_core.train.zero_memory import Device, MemoryPart, MicrobatchMemory, Stage
from launcher.runtime.capacity.workload import MicrobatchShape, microbatch_cost, microbatch_shape
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import (
    largest_tensor_size,
    momentum_matrix_shapes,
    parameter_count,
    teacher_parameter_count,
    with_vocab,
)


def microbatch_memory(recipe: Recipe, shape: MicrobatchShape, device: Device = "cuda") -> MicrobatchMemory:
    """Return the memory that a microbatch of any size, from one example up to `shape`, adds to `fixed_memory`.

    On a CPU, kernels loop over rows, so counting many rows is slow: one and two examples are counted, and larger
    microbatches are extrapolated from these.
    """
    twice = min(shape.rows, 2 * shape.group)
    rows = (shape.group, twice, shape.rows if device == "cuda" else twice)
    found = [microbatch_cost(recipe, replace(shape, rows=number), device).bytes for number in rows]
    return MicrobatchMemory(rows, list(zip(*found, strict=True)))


def fixed_memory(
    recipe: Recipe, trained_count: int, ranks: int, stage: Stage, *, rows: int, bucket: int = BUCKET_SIZE
) -> list[MemoryPart]:
    """Return the memory that each of `ranks` ranks holds throughout training: weights, moments, ...

    `trained_count`: number of trained parameters of the model. `rows`: number of rows of a rank in a step.
    `bucket`: as in `memory.fixed_memory`.
    """
    single = sum(prod(shape) for shape in momentum_matrix_shapes(recipe))
    parts = memory.fixed_memory(
        trained_count,
        ranks,
        stage,
        recipe.precision,
        recipe.reduce_dtype,
        bucket=bucket,
        one_moment=single,
        largest=largest_tensor_size(recipe),
    )
    if recipe.average is not None:
        parts.append(memory.average_memory(trained_count, ranks, stage))
    taught = teacher_parameter_count(recipe)
    if taught:
        parts.append(memory.frozen_memory(taught, recipe.precision))
    if recipe.model.recurrence is not None and recipe.memory_refresh is not None:
        parts.append(_recurrence_cache_memory(recipe.model, recipe.model.recurrence, rows, recipe.precision))
    return parts


def _recurrence_cache_memory(model: ModelConfig, cache: Recurrence, rows: int, precision: str) -> MemoryPart:
    state = 2 if precision == "bf16" else 4
    formula = f"{state} B x {rows} rows x {cache.length} tokens x {model.hidden} x {model.layers} layers"
    numbers = rows * cache.length * model.hidden * model.layers
    return MemoryPart("memory of earlier tokens", formula, state * numbers)


CPU_MICROBATCH_TOKENS = 8192
"""Largest useful number of tokens of a microbatch on a CPU: more are no faster. Measured with one thread, 2 layers of
256, rows of 128: 3.9k tokens/s with 1 row, 5.5k with 16, 6.0k with 64, 5.4k with 128; with 2 layers of 768, rows of
512: 0.8k with 1 row, 1.0k from 4 on."""


@dataclass(frozen=True)
class RankMemory:
    """Predicts the memory of each of `ranks` ranks that train `recipe`, whose vocabulary size is set, on `device`."""

    recipe: Recipe
    parameters: int
    ranks: int
    device: Device

    @classmethod
    def from_recipe(cls, recipe: Recipe, ranks: int, device: Device, vocabulary: int | None = None) -> "RankMemory":
        """Return the prediction for `recipe`. `vocabulary`: size of the tokenizer, if the recipe sets no `model.vocab`.
        Parameters are counted on a module on the meta device."""
        sized = recipe.model_copy(update={"model": with_vocab(recipe.model, vocabulary)})
        return cls(sized, parameter_count(sized), ranks, device)

    def fixed_bytes(self, phase: RecipePhase) -> int:
        """Return the bytes of `fixed_memory` in `phase`."""
        rows = -(-phase.rows_per_step // self.ranks) * self.recipe.input.texts_per_row
        zero, bucket = self.recipe.zero, self._bucket_size
        parts = fixed_memory(self.recipe, self.parameters, self.ranks, zero, rows=rows, bucket=bucket)
        return memory.total_bytes(parts)

    def memory_of_microbatches(self, phase: RecipePhase, max_examples: int) -> MicrobatchMemory:
        """Return the memory that microbatches of up to `max_examples` examples add to `fixed_bytes`."""
        shape = microbatch_shape(self.recipe, phase)
        return microbatch_memory(
            self.recipe, replace(shape, rows=max_examples * self.recipe.input.texts_per_row), self.device
        )

    @property
    def _bucket_size(self) -> int:
        """Number of elements of a gradient bucket that occupy memory (`memory.fixed_memory`)."""
        return BUCKET_SIZE if self.device == "cuda" else min(BUCKET_SIZE, self.parameters)


def rows_that_fit(rank_memory: RankMemory, available_bytes: int) -> list[int]:
    """Return, for each phase, the rows of the largest microbatch that fits into `available_bytes` bytes and is still of
    use (`_max_useful_rows`); at least 1, even if that does not fit."""
    return [
        _phase_rows_that_fit(rank_memory, phase, available_bytes - rank_memory.fixed_bytes(phase))
        for phase in rank_memory.recipe.phases
    ]


def _phase_rows_that_fit(rank_memory: RankMemory, phase: RecipePhase, free_bytes: int) -> int:
    most, texts = _max_useful_rows(rank_memory, phase), rank_memory.recipe.input.texts_per_row

    def rows_up_to(limit: int) -> int:
        """Return the most rows, up to `limit`, that fit if memory between the counted sizes is interpolated."""
        added = rank_memory.memory_of_microbatches(phase, limit)
        sizes = range(2, limit + 1)  # one row is used even if it does not fit
        return 1 + bisect_right(sizes, free_bytes, key=lambda rows: memory.total_bytes(added.parts(rows * texts)))

    found = rows_up_to(min(most, 2 * rows_up_to(most)))  # the second count has a nearer limit, so it interpolates less
    while (counted := rows_up_to(found)) < found:  # until the memory of these very rows has been counted
        found = counted
    return found


def _max_useful_rows(rank_memory: RankMemory, phase: RecipePhase) -> int:
    """Return the largest number of rows worth having in a microbatch: a rank's rows of a step; on a CPU, at most
    `CPU_MICROBATCH_TOKENS` tokens."""
    part = -(-phase.rows_per_step // rank_memory.ranks)
    if rank_memory.device == "cuda":
        return part
    return max(1, min(part, CPU_MICROBATCH_TOKENS // (phase.length * rank_memory.recipe.input.texts_per_row)))
