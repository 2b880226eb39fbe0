"""Held-out figures: the same rows, masks and draws every time, whatever the world size."""

from collections.abc import Iterator

import torch
from torch import Tensor

from encoder_core.objectives.losses import CoupledObjective, LossSums
from encoder_core.train.control import Control
from encoder_core.train.coupled import RankExamples
from encoder_core.train.engine import Engine
from encoder_core.train.metrics import TARGETS, means
from encoder_core.train.seeding import seed_draws
from encoder_core.train.step import Microbatch, Sums, gather_sums

EVALUATION = "evaluation"  # the "turn" of its draws, which are those of step 0 each time


def evaluate(
    engine: Engine, control: Control, microbatches: Iterator[Microbatch], seed: int
) -> dict[str, float]:
    """Mean losses and metrics over the held-out rows of all ranks, dropout off; a generator draws by `seed`.

    Every rank passes the same number of microbatches (idle ones included): ZeRO 3 gathers weights in each forward. A
    coupled objective takes all held-out rows of all ranks as one batch.
    """
    engine.training(False)
    sums, coupled = Sums(), list[Tensor]()
    with torch.no_grad():
        for microbatch in microbatches:
            seed_draws(seed, 0, microbatch.index, EVALUATION)
            losses: LossSums = engine(microbatch.batch)
            sums.add(losses)
            coupled += losses.memory if isinstance(engine.objective, CoupledObjective) else ()
        if isinstance(engine.objective, CoupledObjective):
            everyone, joined = RankExamples.meet(coupled)
            sums.add(engine.objective.losses(joined, engine.objective.couple(joined, everyone)))
    totals = gather_sums(control, sums.collect())
    return means(totals) | {name: n for name, n in totals.items() if name.endswith(TARGETS)}
