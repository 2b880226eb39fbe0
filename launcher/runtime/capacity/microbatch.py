"""How many rows of a microbatch a device's memory permits, by the estimate: `microbatch: auto` begins with that."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from encoder_core.train import zero_memory as memory
from encoder_core.train.engine_config import BUCKET
from launcher.runtime.capacity import memory_bill
from launcher.runtime.capacity.workload import microbatch_shape
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import known, parameters

CPU_TOKENS = 8192
"""Tokens of a microbatch on a CPU, where more are no faster. One thread, 2 layers of 256, rows of 128: 3.9k tokens/s
with 1 row, 5.5k with 16, 6.0k with 64, 5.4k with 128; 2 layers of 768, rows of 512: 0.8k with 1, 1.0k from 4 on."""


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
        """Builds a module without memory, to count parameters. `vocabulary`: the tokenizer's size, where the recipe
        leaves the model's to it."""
        if vocabulary is not None and recipe.model.vocab is None:
            recipe = recipe.model_copy(
                update={"model": recipe.model.model_copy(update={"vocab": vocabulary})}
            )
        sized = recipe.model_copy(update={"model": known(recipe.model)})
        return cls(sized, parameters(sized), ranks, device)

    def kept(self, phase: RecipePhase) -> int:
        """Bytes that are filled all the time."""
        rows = -(-phase.rows // self.ranks) * self.recipe.input.texts
        zero, bucket = self.recipe.zero, self._bucket
        parts = memory_bill.kept(self.recipe, self.parameters, self.ranks, zero, rows=rows, bucket=bucket)
        return memory.total(parts)

    def with_rows(self, phase: RecipePhase, rows: int) -> int:
        """Bytes at their most, with microbatches of so many rows."""
        parts = memory_bill.bill(
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
    """Of each phase, the most rows of a microbatch that fit into `room` bytes and are of use; at least 1."""
    return [
        _most(_useful(bill, phase), lambda rows, phase=phase: bill.with_rows(phase, rows) <= room)  # type: ignore[misc]
        for phase in bill.recipe.phases
    ]


def _useful(bill: Bill, phase: RecipePhase) -> int:
    """A rank's part of a step; on a CPU `CPU_TOKENS`."""
    part = -(-phase.rows // bill.ranks)
    if bill.device == "cuda":
        return part
    return max(1, min(part, CPU_TOKENS // (phase.length * bill.recipe.input.texts)))


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, by halving; 1 if none does."""
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
