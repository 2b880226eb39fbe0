"""LAMB under a real DeepSpeed engine, driven by gradients chosen in advance."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.lamb import Lamb
from encoder_core.optim.settings import LambConfig
from encoder_core.optim.updates import set_update
from encoder_core.train.engine import Engine
from encoder_core.train.engine_config import EngineConfig
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import MASTER
from tests.support.ranks.fragments import Piece, pieces
from tests.support.ranks.small_training import BUCKET

STEPS, RATE = 10, 0.01
CONFIG = LambConfig(lr=RATE, weight_decay=0.01, clip=None)

Weights = dict[str, np.ndarray]


class Linear(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, rows: int, columns: int, draws: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=draws))
        self.bias = nn.Parameter(torch.randn(rows, generator=draws))

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (self.weight * weight).sum() + (self.bias * bias).sum()


@dataclass(frozen=True)
class Gradients:
    """In place of a batch: what the engine asks of one, and a gradient for every parameter."""

    tokens: Tensor
    gradients: list[Tensor]


class Model(nn.Module):
    """Odd sizes, so that partitions cut parameters anywhere; one is larger than the others together."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList([Linear(*shape, draws) for shape in ((3, 5), (31, 17), (7, 11), (1, 1))])

    def forward(self, batch: Any) -> Tensor:
        pairs = zip(batch.gradients[0::2], batch.gradients[1::2], strict=True)
        return sum(layer(*pair) for layer, pair in zip(self.layers, pairs, strict=True))


def gradients(step: int) -> list[Tensor]:
    """A gradient for every parameter, of very different sizes."""
    draws = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(p.shape, generator=draws) * 10.0 ** (i % 4 - 2)
        for i, p in enumerate(Model().parameters())
    ]


def unsharded() -> Weights:
    """All steps on whole parameters."""
    model = Model()
    optimizer = Lamb(parameter_groups(model, CONFIG.weight_decay), CONFIG)
    for step in range(STEPS):
        for p, g in zip(model.parameters(), gradients(step), strict=True):
            p.grad = g
        set_update(optimizer, lr=RATE, count=step + 1)
        optimizer.step()
    return {name: p.detach().numpy().ravel() for name, p in model.named_parameters()}


def sharded(rank: int, world: int, stages: list[Stage]) -> list[list[Piece]]:
    """All steps under each ZeRO stage; this rank's fragments of the weights afterwards."""
    return [_run(stage, world) for stage in stages]


def _run(stage: Stage, world: int) -> list[Piece]:
    model = Model()
    shapes = [p.shape for p in model.parameters()]
    optimizer = Lamb(parameter_groups(model, CONFIG.weight_decay), CONFIG)
    engine = Engine(
        model, optimizer, EngineConfig(stage, "fp32", None, 0 if stage == 3 else None, bucket=BUCKET)
    )
    for step in range(STEPS):
        # Half from each of two ranks is exact in binary, so the reduced gradient is the chosen one.
        parts = [g.reshape(shape) for g, shape in zip(gradients(step), shapes, strict=True)]
        batch: Any = Gradients(torch.ones(1), parts)
        loss = engine(batch)
        engine.backward(loss / world, last=True)
        assert engine.update(RATE, step + 1).applied
    return pieces(engine.fragments(), [MASTER])
