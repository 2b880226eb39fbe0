"""What a rank tries before it trains: whether a microbatch fits into memory, and whether gradients are summed
correctly.

A step cannot be undone once it has begun: an error in the middle of a backward pass leaves gradients half summed, and
the other ranks wait in a collective that this rank never enters. So a microbatch larger than any before is rehearsed:
its passes run outside the engine, and their gradients are discarded. No other rank waits.

Methods that we replace in DeepSpeed may still exist in a later release but no longer be called. Then gradients would
be wrong without an error. So before the first step a network of six numbers takes a step of two microbatches through
an engine of its own, and the sum of its gradients is measured. Its state is read and restored, too, so that a name
that a later release does not have is missed now and not at the first save.
"""

import gc
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch, idle_batch
from encoder_core.errors import library_changed
from encoder_core.objectives.modules.losses import CoupledObjective
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import ALL_PARAMETERS
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankExamples
from encoder_core.train.settings import EngineConfig
from encoder_core.train.step import Microbatch
from encoder_core.train.zero_state import KINDS


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device, or the host, has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@dataclass
class Rehearsal:
    """Rehearses microbatches. Not for stage 3, where a forward pass gathers weights from all ranks.

    Attributes:
        kept: bytes that weights, gradients, optimizer and buckets will fill. The part that a GPU does not hold yet is
            reserved during a rehearsal, because moments are allocated by the first update.
        proven: number of tokens, memory included, of the largest microbatch that is known to fit.
    """

    engine: Engine
    kept: int
    proven: int = 0

    def fits(self, microbatches: Sequence[Microbatch], memories: Mapping[int, tuple[Tensor, ...]]) -> bool:
        """Return whether a step's `microbatches` fit. The largest is rehearsed unless one of its size has fitted
        before.
        """
        sizes = {_microbatch_size(each, memories.get(each.index, ())): each for each in microbatches}
        size = max(sizes, default=0)
        if size <= self.proven:
            return True
        if not self._rehearse(sizes[size], memories.get(sizes[size].index, ())):
            # Not in the `except` block, where the error still holds its frames' tensors.
            _release_memory(self.engine.device)
            return False
        self.proven = size
        return True

    def _rehearse(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> bool:
        try:
            reserved = self._reserve()
            self._run_passes(microbatch, memory)
            del reserved
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _reserve(self) -> Tensor:
        device = self.engine.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else self.kept
        return torch.empty(max(0, self.kept - held), dtype=torch.uint8, device=device)

    def _run_passes(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> None:
        """Run the passes of each update group as a step does."""
        objective, batch = self.engine.objective, microbatch.batch
        self.engine.set_training(True)
        if isinstance(objective, CoupledObjective):
            with torch.no_grad():
                everyone, own = RankExamples.from_one_microbatch(*objective(batch).memory)
                memory = objective.couple(own, everyone)
        for group in self.engine.update_groups:
            self.engine.begin_update_group(group)
            losses = objective(batch, memory) if memory else objective(batch)
            memory = losses.memory
            loss = sum(term.loss_sum for term in losses.terms)
            trained = [p for p in objective.parameters() if p.requires_grad]
            # Gradients are returned, not added to `grad`.
            torch.autograd.grad(loss, trained, allow_unused=True)


def _microbatch_size(microbatch: Microbatch, memory: tuple[Tensor, ...]) -> int:
    """Return the size of a microbatch. `memory` counts by its numbers, because XLNet's keys are longer with it."""
    return microbatch.batch.tokens.numel() + sum(tensor.numel() for tensor in memory)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_MICROBATCHES = 2
# Elements of a bucket. DeepSpeed's stage 3 reduces smaller and larger parameters in different ways; both occur.
_PROBE_BUCKET_ELEMENTS = 3
_SUM_TOLERANCE = 0.01  # error of sums in bf16 over many ranks; a mean would be wrong by the number of ranks


class _UnitGradientNetwork(nn.Module):
    """A network whose gradient by every number is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5))

    def forward(self, batch: Batch) -> Tensor:
        return self.small.float().sum() + self.large.float().sum()


_verified_ranks: dict[EngineConfig, int] = {}  # largest number of ranks whose sums this process found right


def verified_rank_count(config: EngineConfig) -> int:
    """Return with how many ranks this process has ensured sums; 0 if it never has."""
    return _verified_ranks.get(config, 0)


def sums_are_verified(verified_counts: Sequence[int]) -> bool:
    """Return whether a group need not ensure sums, since all of its processes have (`verified_counts`: by rank, with
    how many ranks), and if they are several, some of them over several: libraries do not change while a process
    lives."""
    return min(verified_counts) > 0 and max(verified_counts) >= min(len(verified_counts), 2)


def verify_gradient_sums(config: EngineConfig) -> float:
    """Take the step, and return the relative error of the gradient's norm. Collective; draws no random numbers.

    Raises:
        LibraryChanged: the norm is not that of the sum over ranks and microbatches, or DeepSpeed lacks a name.
    """
    model = _UnitGradientNetwork()
    threshold = 1 if config.stage == 3 else None  # one parameter stays whole, the other is sharded
    probed = replace(config, clip=None, bucket=_PROBE_BUCKET_ELEMENTS, persistence_threshold=threshold)
    engine = Engine(model, AdamW(parameter_groups(model, 0.0), AdamWConfig(lr=1.0)), probed)
    with closing(engine):
        engine.begin_update_group(ALL_PARAMETERS)
        batch: Any = idle_batch(engine.device)
        for number in range(_MICROBATCHES):
            engine.backward(engine(batch), last=number == _MICROBATCHES - 1)
        found = engine.update(0.0, 1, largest_norm=sys.float_info.max).grad_norm
        list(engine.fragments())
        engine.restore(KINDS, lambda name, kind, start, stop: torch.zeros(stop - start))
    expected = _MICROBATCHES * engine.world * math.sqrt(sum(math.prod(s) for s in engine.shapes.values()))
    error = abs(found - expected) / expected
    if not error < _SUM_TOLERANCE:
        raise library_changed(
            "deepspeed",
            f"ZeRO {config.stage} in {config.precision}: the sum of known gradients of {engine.world} ranks has the "
            f"norm {found:g} in place of {expected:g}. How it",
        )
    _verified_ranks[config] = max(verified_rank_count(config), engine.world)
    return float(error)
