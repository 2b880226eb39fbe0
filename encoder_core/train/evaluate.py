"""Held-out figures: the same rows, masks and draws every time, whatever the world size."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.objectives.losses import CoupledObjective, LossSums
from encoder_core.train.coupled import RankExamples
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import Control
from encoder_core.train.metrics import TARGETS, means
from encoder_core.train.step import Microbatch, Sums, gather_sums, seed_draws

EVALUATION = "evaluation"  # the "update group" of its draws, which are those of step 0 each time


def evaluate(
    engine: Engine, control: Control, microbatches: Iterable[Microbatch], seed: int
) -> dict[str, float]:
    """Mean losses and metrics over the held-out rows of all ranks, dropout off; a generator draws by `seed`.

    Every rank passes the same number of microbatches (idle ones included): ZeRO 3 gathers weights in each forward.
    """
    engine.training(False)
    totals = gather_sums(control, sum_losses(engine, engine.objective, microbatches, seed))
    return means(totals) | {name: n for name, n in totals.items() if name.endswith(TARGETS)}


@torch.no_grad()
def sum_losses(
    forward: Callable[[Batch], LossSums], objective: nn.Module, microbatches: Iterable[Microbatch], seed: int
) -> dict[str, float]:
    """This rank's sums of losses, targets and metrics. `forward` is `objective`, or the engine around it.

    A coupled objective takes all rows of all ranks as one batch: then it is collective.
    """
    sums, coupled = Sums(), list[Tensor]()
    for microbatch in microbatches:
        seed_draws(seed, 0, microbatch.index, EVALUATION)
        losses = forward(microbatch.batch)
        sums.add(losses)
        coupled += losses.memory if isinstance(objective, CoupledObjective) else ()
    if isinstance(objective, CoupledObjective):
        everyone, joined = RankExamples.meet(coupled)
        sums.add(objective.losses(joined, objective.couple(joined, everyone)))
    return sums.collect()
