"""Held-out figures: the same rows under the same masks every time, whatever the world size."""

from collections.abc import Iterator

import torch

from encoder_core.train.control import Control
from encoder_core.train.engine import Engine
from encoder_core.train.metrics import TARGETS, means
from encoder_core.train.step import Microbatch, Sums, gather_sums


def evaluate(engine: Engine, control: Control, microbatches: Iterator[Microbatch]) -> dict[str, float]:
    """Mean losses and metrics over the held-out rows of all ranks, dropout off.

    Every rank passes the same number of microbatches (idle ones included): ZeRO 3 gathers weights in each forward.
    """
    engine.training(False)
    sums = Sums()
    with torch.no_grad():
        for microbatch in microbatches:
            sums.add(engine(microbatch.batch))
    totals = gather_sums(control, sums.collect())
    return means(totals) | {name: n for name, n in totals.items() if name.endswith(TARGETS)}
