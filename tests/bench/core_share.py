"""How much of a core a training step of each family uses: python tests/bench/core_share.py [FAMILY...].

FLOPs of a forward and a backward pass at base size, as `encoder_core/train/counting.py` counts them, by CPU seconds,
divided by what one thread of this machine reaches in products of square matrices, measured before and after in the same
process. What is missing to 1 went into softmax, dropout, norms, activations, and matrices of less favourable shapes.
fp32.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from program import note, run
from step import BASE
from step_batch import in_random_order, make_batch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.train.counting import count
from launcher.runtime.capacity.workload import Shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.objective import MlmTerm, PlmTerm, RecipeObjective

_SIZE, _PEAK_S = 1024, 2.0  # of the square matrices; seconds of measuring them
_TARGETS = 0.15


@dataclass(frozen=True)
class Share:
    """Of one family: GFLOP/s of its step and of square products around it, by CPU seconds."""

    family: str
    layers: int
    step: float
    peak: float

    @property
    def share(self) -> float:
        return self.step / self.peak


def main(
    families: Annotated[list[str] | None, typer.Argument(help="All, if none is named.")] = None,
    rows: int = 4,
    length: int = 512,
    layers: Annotated[int | None, typer.Option(help="So many of the base's.")] = None,
    rounds: int = 2,
) -> None:
    torch.set_num_threads(1)
    known = configurations()
    print(
        f"| family, {rows} rows of {length} | layers | GFLOP/s | square products | share |\n|---|--:|--:|--:|--:|"
    )
    for family in families or known:
        config = known[family] if layers is None else known[family].model_copy(update={"layers": layers})
        note(f"{family}: {config.layers} layers")
        found = measured(family, config, Shape(rows, length, round(_TARGETS * length)), rounds)
        print(
            f"| {family} | {found.layers} | {found.step:.1f} | {found.peak:.1f} | {found.share:.0%} |",
            flush=True,
        )


def configurations() -> dict[str, ModelConfig]:
    """Base sizes by family."""
    found: dict[str, ModelConfig] = {str(family): config for family, config in BASE.items()}
    for name in ("modernbert-base", "eurobert-210m"):
        model = load(name).model
        assert isinstance(model, ModernBertConfig | EuroBertConfig)
        found[model.family] = model.model_copy(update={"vocab": model.vocab or 50_368})
    return found


def measured(family: str, config: ModelConfig, shape: Shape, rounds: int) -> Share:
    """Its own objective: permuted or masked words."""
    objective = (
        RecipeObjective(plm=PlmTerm()) if isinstance(config, XlnetConfig) else RecipeObjective(mlm=MlmTerm())
    )
    module = objective_module(config, objective)
    initialise(module, 0.02)
    batch = _batch(config, shape)
    flops = count(lambda: objective_module(config, objective), batch, torch.float32, "cuda").model
    before, seconds = peak(), []
    for number in range(rounds + 1):
        began = time.process_time()
        _step(module, batch)
        if number:  # the first one warms up
            seconds.append(time.process_time() - began)
    around = statistics.mean((before, peak()))
    return Share(family, config.layers, flops / statistics.median(seconds) / 1e9, around / 1e9)


def _batch(config: ModelConfig, shape: Shape) -> Batch:
    batch = make_batch([shape.length] * shape.rows, config.vocabulary)
    return in_random_order(batch) if isinstance(config, XlnetConfig) else batch


def _step(module: ObjectiveModule, batch: Batch) -> None:
    (term,) = module(batch).terms
    loss: Tensor = term.loss_sum / term.targets
    loss.backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)


def peak() -> float:
    """FLOP/s of one thread, by CPU seconds: the best of some products of two square matrices."""
    matrix, best = torch.ones(_SIZE, _SIZE), float("inf")
    end = time.monotonic() + _PEAK_S
    while time.monotonic() < end or best == float("inf"):
        began = time.process_time()
        torch.mm(matrix, matrix)
        best = min(best, time.process_time() - began)
    return 2.0 * _SIZE**3 / best


if __name__ == "__main__":
    run(main)
