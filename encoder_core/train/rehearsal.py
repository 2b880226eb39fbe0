"""What a rank tries before it trains: whether a microbatch fits its device, and whether gradients are added up rightly.

A step cannot be taken back once it has begun: an error in the middle of a backward pass leaves gradients half summed,
and the other ranks wait in a collective that this one never enters. So a microbatch larger than any before is
rehearsed: its passes run by themselves, and their gradients are thrown away. The engine does not notice, and no rank
waits for another.

Names that we replace in DeepSpeed may still exist in a later release and no longer be called. Then gradients would be
other numbers, and no error would say so. So before the first step a network of six numbers takes a step of two
microbatches through an engine of its own, and the sum of its gradients is measured.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.errors import library_changed
from encoder_core.objectives.losses import CoupledObjective
from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.updates import WHOLE
from encoder_core.train.collate import idle_batch
from encoder_core.train.engine import Engine
from encoder_core.train.engine_config import EngineConfig
from encoder_core.train.exchange import RankExamples
from encoder_core.train.step import Microbatch


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@dataclass
class Rehearsal:
    """Not for stage 3, where a forward pass gathers weights from all ranks.

    Attributes:
        kept: bytes that weights, gradients, optimizer and buckets will fill. What of it a GPU does not hold yet is kept
            free while something is rehearsed: moments come with the first update.
        proven: tokens, carried ones included, of the largest microbatch that is known to fit.
    """

    engine: Engine
    kept: int
    proven: int = 0

    def fits(self, microbatches: Sequence[Microbatch], memories: Mapping[int, tuple[Tensor, ...]]) -> bool:
        """Rehearses the largest of a step's `microbatches` if none as large has fitted yet."""
        sizes = {_tokens(each, memories.get(each.index, ())): each for each in microbatches}
        size = max(sizes, default=0)
        if size <= self.proven:
            return True
        if not self._fits(sizes[size], memories.get(sizes[size].index, ())):
            _release(self.engine.device)  # not while the error is handled: it holds the tensors of its frames
            return False
        self.proven = size
        return True

    def _fits(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> bool:
        try:
            reserved = self._reserve()
            self._passes(microbatch, memory)
            del reserved
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return False
        return True

    def _reserve(self) -> Tensor:
        device = self.engine.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else self.kept
        return torch.empty(max(0, self.kept - held), dtype=torch.uint8, device=device)

    def _passes(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> None:
        """Of each update group, as a step makes them."""
        objective, batch = self.engine.objective, microbatch.batch
        self.engine.training(True)
        if isinstance(objective, CoupledObjective):
            with torch.no_grad():
                everyone, own = RankExamples.alone(*objective(batch).memory)
                memory = objective.couple(own, everyone)
        for group in self.engine.update_groups:
            self.engine.begin(group)
            losses = objective(batch, memory) if memory else objective(batch)
            memory = losses.memory
            loss = sum(term.loss_sum for term in losses.terms)
            trained = [p for p in objective.parameters() if p.requires_grad]
            torch.autograd.grad(loss, trained, allow_unused=True)  # gradients by name: none is added to a sum


def _tokens(microbatch: Microbatch, memory: tuple[Tensor, ...]) -> int:
    """`memory` counts by its numbers: XLNet's keys are longer with it."""
    return microbatch.batch.tokens.numel() + sum(tensor.numel() for tensor in memory)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
