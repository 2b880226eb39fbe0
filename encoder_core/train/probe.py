"""Measures, before the first step, that the ranks' gradients are added up as `Engine` means them to be.

Names that we replace in DeepSpeed may be there and not be called any more: then a gradient would be another number, and
nothing would say so. So a network of six numbers takes a step of two microbatches through an engine of its own.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.errors import library_changed
from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.updates import WHOLE
from encoder_core.train.collate import idle_batch
from encoder_core.train.engine import Engine
from encoder_core.train.engine_config import EngineConfig

_MICROBATCHES = 2
_BUCKET = (
    3  # numbers: one parameter has fewer and one more, which DeepSpeed's stage 3 reduces in different ways
)
_TOLERANCE = 0.01  # sums in bf16 over many ranks; a mean is wrong by the number of ranks


class _Ones(nn.Module):
    """The gradient of every number is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5))

    def forward(self, batch: Batch) -> Tensor:
        return self.small.float().sum() + self.large.float().sum()


def ensure_sums(config: EngineConfig) -> float:
    """Take the step, and return the largest relative error of the gradient's norm. Collective; draws nothing.

    Raises LibraryChanged: the norm is not that of the sum over ranks and microbatches.
    """
    model = _Ones()
    threshold = 0 if config.stage == 3 else None
    probed = replace(config, clip=None, bucket=_BUCKET, persistence_threshold=threshold)
    engine = Engine(model, AdamW(parameter_groups(model, 0.0), AdamWConfig(lr=1.0)), probed)
    engine.begin(WHOLE)
    batch: Any = idle_batch(engine.device)
    for number in range(_MICROBATCHES):
        engine.backward(engine(batch), last=number == _MICROBATCHES - 1)
    found = engine.update(0.0, 1).grad_norm
    expected = _MICROBATCHES * engine.world * math.sqrt(sum(math.prod(s) for s in engine.shapes.values()))
    error = abs(found - expected) / expected
    if not error < _TOLERANCE:
        raise library_changed(
            "deepspeed",
            f"ZeRO {config.stage} in {config.precision}: the sum of known gradients of {engine.world} ranks has the "
            f"norm {found:g} in place of {expected:g}. How it",
        )
    return float(error)
