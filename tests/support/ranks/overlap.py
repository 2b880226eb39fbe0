"""Sums of gradients over the ranks: during the backward pass and after it, as DeepSpeed does; and of a network whose
branches each rank goes through in an order of its own. For `run_ranks`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch, idle_batch
from encoder_core.objectives.modules.losses import LossSums, Term
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import ALL_PARAMETERS
from encoder_core.train.engine import Engine
from encoder_core.train.overlap import OverlappedSums
from encoder_core.train.settings import EngineConfig
from tests.support.ranks import small_training as small
from tests.support.ranks.fragments import Piece, pieces
from tests.support.ranks.small_training import Setting, Trace

WIDTHS = (3, 17, 40, 8, 25, 1, 33, 12)
STEPS, MICROBATCHES = 3, 2


@contextmanager
def after_backward() -> Iterator[None]:
    """Engines that are made here leave it to DeepSpeed."""
    with patch.object(EngineConfig, "has_separate_fp32_sums", False):
        yield


def during_and_after(
    rank: int, world: int, settings: list[Setting]
) -> tuple[list[Trace], list[Trace], list[tuple[int, int]]]:
    """Some steps during and after; and of each sum, buckets begun by the end of the backward pass, and all."""
    begun: list[tuple[int, int]] = []
    finish = OverlappedSums.finish

    def noted(self: OverlappedSums) -> None:
        begun.append((self._next, len(self._buckets)))
        finish(self)

    with patch.object(OverlappedSums, "finish", noted):
        during = small.train(rank, world, settings, 0, 3, poisoned=1)
    with after_backward():
        after = small.train(rank, world, settings, 0, 3, poisoned=1)
    return during, after, begun


class Branches(nn.Module):
    """Matrices that all read the same numbers; adds up what they make of them, in any order. `unused` has no gradient
    on any rank. All are one module's own, which ZeRO 3 gathers together."""

    def __init__(self, draws: random.Random | None) -> None:
        super().__init__()
        for number, width in enumerate(WIDTHS):
            self.register_parameter(f"matrix{number}", nn.Parameter(torch.randn(width, 5) / 5))
        self.unused = nn.Parameter(torch.ones(30))
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        order = [getattr(self, f"matrix{number}") for number in range(len(WIDTHS))]
        if self.draws is not None:
            self.draws.shuffle(order)
        loss = torch.zeros((), requires_grad=True)
        for matrix in order:
            loss = loss + (matrix @ x.to(matrix.dtype)).float().square().sum()
        return loss


class Model(nn.Module):
    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches
        self.inputs = torch.zeros(5)

    def forward(self, batch: Batch) -> LossSums:
        return LossSums((Term("mlm", self.branches(self.inputs), 1),))


def numbers(step: int, microbatch: int, rank: int) -> Tensor:
    """What the branches of a rank read."""
    return torch.randn(5, generator=torch.Generator().manual_seed(step * 100 + microbatch * 10 + rank))


def train_branches(
    rank: int, world: int, config: EngineConfig, seed: int | None
) -> tuple[list[Piece], dict[str, tuple[int, ...]]]:
    """The weights after some steps; `seed`: of the orders, None for the same one always."""
    torch.manual_seed(1)
    model = Model(Branches(None if seed is None else random.Random(f"{seed} {rank}")))
    groups = parameter_groups(model, 0.01)
    engine = Engine(model, AdamW(groups, AdamWConfig(lr=1e-2)), config)
    for step in range(STEPS):
        engine.begin_update_group(ALL_PARAMETERS)
        for microbatch in range(MICROBATCHES):
            model.inputs = numbers(step, microbatch, rank)
            loss = engine(idle_batch(torch.device("cpu"))).terms[0].loss_sum
            engine.backward(loss, last=microbatch == MICROBATCHES - 1)
        assert engine.update(1e-2, step + 1).applied
    return pieces(engine.fragments()), engine.shapes


def in_any_order(
    rank: int, world: int, cases: list[tuple[EngineConfig, int]]
) -> list[tuple[tuple[list[Piece], dict[str, tuple[int, ...]]], ...]]:
    """Of each case, steps in one order and in orders of the ranks' own."""
    return [
        (train_branches(rank, world, config, None), train_branches(rank, world, config, seed)) for config, seed in cases
    ]
