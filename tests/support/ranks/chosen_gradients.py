"""Muon, StableAdamW and LAMB under a real DeepSpeed engine, driven by gradients chosen in advance, on matrices of
random shapes, of which some parameters hold several. Weights at first and gradients are numbers that bfloat16 has, so
that training in it rounds neither."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from encoder_core.layers.kernel_choice import force_kernel
from encoder_core.layers.parameters import IntoHeads, JoinedLinear
from encoder_core.optim import adamw, muon
from encoder_core.optim.adamw import StableAdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.lamb import Lamb
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import LambConfig, MuonConfig, StableAdamWConfig
from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import ALL_KINDS
from tests.support.ranks.fragments import Piece, Whole, pieces
from tests.support.ranks.small_training import small_engine

STEPS, RATE = 10, 0.01
MUON = MuonConfig(lr=RATE, clip=None)
STABLE = StableAdamWConfig(lr=RATE, betas=(0.9, 0.98), weight_decay=0.1)
LAMB = LambConfig(lr=RATE, weight_decay=0.01, clip=None)


@dataclass(frozen=True)
class Case:
    """`seed` draws the model: how many matrices, their shapes and weights."""

    optimizer: Literal["muon", "stableadamw", "lamb"]
    stage: Stage
    seed: int
    precision: Precision = "fp32"


class Linear(nn.Linear):
    """Its gradients are what it is called with."""

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return (self.weight * weight).sum() + (self.bias * bias).sum()


class Heads(IntoHeads):
    """A matrix of three dimensions."""

    def forward(self, weight: Tensor) -> Tensor:
        return (self.weight * weight).sum()


class Several(JoinedLinear):
    """Matrices in one parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return (self.weight * weight).sum()


class Model(nn.Module):
    """Odd sizes: partitions cut matrices anywhere, some into more than two, and some ranks hold none of some.

    `rows`: of the parameters that hold several matrices, by name, the matrix that each row is of. `rates`: the factor
    of each parameter's learning rate, as muP has them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [(draws.randint(1, 40), draws.randint(1, 40)) for _ in range(draws.randint(2, 5))]
        several = [
            (draws.randint(1, 20), [draws.randint(1, 9) for _ in range(draws.randint(2, 4))], times)
            for times in (1, draws.randint(2, 4))
        ]
        self.layers = nn.ModuleList(
            [
                Heads(6, 3),
                *(Linear(*size) for size in sizes),
                *(Several(inputs, rows, bias=False, times=times) for inputs, rows, times in several),
            ]
        )
        self.rows = {
            f"layers.{1 + len(sizes) + i}.weight": [part for part, r in enumerate(rows) for _ in range(r)] * times
            for i, (_, rows, times) in enumerate(several)
        }
        self.head = Linear(draws.randint(1, 20), draws.randint(1, 20))
        self.rates = {name: draws.choice((1.0, 1.0, 0.5, 0.125)) for name, _ in self.named_parameters()}
        for p in self.parameters():
            p.data = torch.randn(p.shape).bfloat16().float()

    def forward(self, batch: Any) -> Tensor:
        given = iter(batch.gradients)
        modules = [*self.layers, self.head]
        return sum(module(*(next(given) for _ in module.parameters())) for module in modules)


@dataclass(frozen=True)
class Gradients:
    """In place of a batch: what the engine asks of one, and a gradient for every parameter."""

    tokens: Tensor
    gradients: list[Tensor]


def gradients(shapes: Sequence[Sequence[int]], step: int) -> list[Tensor]:
    """A gradient for every parameter, of very different sizes, and in some steps much larger than before: what update
    clipping is for."""
    draws = torch.Generator().manual_seed(100 + step)
    surprise = 30.0 if step % 4 == 3 else 1.0
    drawn = (torch.randn(tuple(shape), generator=draws) for shape in shapes)
    return [(g * surprise * 10.0 ** (i % 4 - 2)).bfloat16().float() for i, g in enumerate(drawn)]


def shapes_of(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in model.parameters()]


def optimizer_of(case: Case, model: Model) -> torch.optim.Optimizer:
    if case.optimizer == "muon":
        return Muon(parameter_groups(model, MUON.weight_decay, matrices=True, rates=model.rates), MUON)
    if case.optimizer == "lamb":
        return Lamb(parameter_groups(model, LAMB.weight_decay, rates=model.rates), LAMB)
    return StableAdamW(parameter_groups(model, STABLE.weight_decay, rates=model.rates), STABLE)


def run(
    rank: int,
    world: int,
    cases: list[Case],
    first: int = 0,
    stop: int = STEPS,
    states: list[Whole] | None = None,
) -> list[list[Piece]]:
    """Steps [first, stop) of each case, from `states` if given; this rank's fragments afterwards."""
    return [_run(case, world, range(first, stop), states[i] if states else None) for i, case in enumerate(cases)]


def run_fused(*given: Any) -> list[list[Piece]]:
    """`run` with StableAdamW's kernels, interpreted."""
    with patch.object(adamw, "_supports", lambda p: True), force_kernel("fused", "update"):
        return run(*given)


def run_in_rounds(*given: Any) -> list[list[Piece]]:
    """`run` with memory for one of Muon's larger matrices, or few small ones, at a time."""
    with patch.object(muon, "ROUND_ELEMENTS", 300):
        return run(*given)


def _run(case: Case, world: int, steps: range, state: Whole | None) -> list[Piece]:
    model = Model(case.seed)
    shapes = shapes_of(model)
    engine = small_engine(model, optimizer_of(case, model), case.stage, case.precision)
    if state is not None:
        engine.restore(ALL_KINDS, lambda name, kind, a, b: torch.from_numpy(state[name][kind][a:b]))
    for step in steps:
        batch: Any = Gradients(torch.ones(1), gradients(shapes, step))
        # Rank 0 alone brings the gradient, so that the sum over any number of ranks is exact.
        engine.backward(engine(batch) * float(engine.rank == 0), last=True)
        assert engine.update(RATE, step + 1).applied
    return pieces(engine.fragments())
