"""Whether a rank's largest microbatch fits into its device's memory, found out before a step and apart from it.

A step cannot be taken back once it has begun: an error in the middle of a backward pass leaves gradients half summed,
and other ranks in a collective that this one never enters. So a microbatch larger than any before is rehearsed: its
passes run by themselves, and what they give is thrown away. Nothing of the engine notices, and no rank waits for
another.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_core.objectives.losses import CoupledObjective
from encoder_core.train.coupled import RankExamples
from encoder_core.train.engine import Engine
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
