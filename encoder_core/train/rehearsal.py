"""Checks before training: whether a microbatch fits into memory, and whether gradients are summed correctly.

A step cannot be undone once it has begun: an error in the middle of a backward pass leaves gradients half summed, and
the other ranks wait in a collective that this rank never enters. So a microbatch larger than any before is rehearsed:
its passes run outside the engine, and their gradients are discarded. No other rank waits.

A later release of DeepSpeed may keep the methods that we replace, but no longer call them. Then gradients would be
wrong without an error. So before the first step, a network of six parameters takes a step of two microbatches in an
engine of its own, and the norm of its summed gradients is checked. Its state is read and restored, too, so that a
missing private name raises an error now and not at the first save.
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
    """Return whether `error` means that the GPU or the host has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@dataclass
class Rehearsal:
    """Runs large microbatches on trial, to find out whether they fit into memory. Not for ZeRO stage 3, where a forward
    pass gathers weights from all ranks.

    Attributes:
        kept: bytes of weights, gradients, optimizer state and buckets. A rehearsal reserves the bytes that are not yet
            allocated, such as the moments, which the first update allocates.
        proven: size (`_microbatch_size`) of the largest microbatch that is known to fit.
    """

    engine: Engine
    kept: int
    proven: int = 0

    def fits(self, microbatches: Sequence[Microbatch], memories: Mapping[int, tuple[Tensor, ...]]) -> bool:
        """Return whether a step's `microbatches` fit into memory. The largest is rehearsed, unless one of its size has
        fitted before.
        """
        sizes = {_microbatch_size(each, memories.get(each.index, ())): each for each in microbatches}
        size = max(sizes, default=0)
        if size <= self.proven:
            return True
        if not self._rehearse(sizes[size], memories.get(sizes[size].index, ())):
            # Memory is not released in the `except` block, where the error's frames still refer to tensors.
            _release_memory(self.engine.device)
            return False
        self.proven = size
        return True

    def _rehearse(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> bool:
        """Run the passes of a microbatch, and return whether memory sufficed."""
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
        """Allocate the bytes of `kept` that are not allocated yet."""
        device = self.engine.device
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else self.kept
        return torch.empty(max(0, self.kept - held), dtype=torch.uint8, device=device)

    def _run_passes(self, microbatch: Microbatch, memory: tuple[Tensor, ...]) -> None:
        """Run the forward and backward passes of each update group, as a step does."""
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
            # `autograd.grad` returns gradients and does not add them to `grad`.
            torch.autograd.grad(loss, trained, allow_unused=True)


def _microbatch_size(microbatch: Microbatch, memory: tuple[Tensor, ...]) -> int:
    """Return the number of tokens plus the number of elements of XLNet's `memory`, which adds keys."""
    return microbatch.batch.tokens.numel() + sum(tensor.numel() for tensor in memory)


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_MICROBATCHES = 2  # number of microbatches of the tiny network's step
# Elements of a bucket. Stage 3 reduces parameters smaller and larger than a bucket differently; the network has both.
_PROBE_BUCKET_ELEMENTS = 3
_SUM_TOLERANCE = 0.01  # relative error of bf16 sums over many ranks; a mean instead of a sum is off by far more


class _UnitGradientNetwork(nn.Module):
    """A network of six parameters whose gradients are all 1."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5))

    def forward(self, batch: Batch) -> Tensor:
        return self.small.float().sum() + self.large.float().sum()


_verified_ranks: dict[EngineConfig, int] = {}  # largest number of ranks for which this process has verified sums


def verified_rank_count(config: EngineConfig) -> int:
    """Return the largest number of ranks with which this process has verified gradient sums; 0 if it has not."""
    return _verified_ranks.get(config, 0)


def sums_are_verified(verified_counts: Sequence[int]) -> bool:
    """Return whether ranks can skip `verify_gradient_sums`: every process has run it and, if there are several ranks
    now, one of them with several ranks. `verified_counts`: each rank's `verified_rank_count`."""
    return min(verified_counts) > 0 and max(verified_counts) >= min(len(verified_counts), 2)


def verify_gradient_sums(config: EngineConfig) -> float:
    """Take one step with a tiny network, and return the relative error of the gradient norm. Collective; draws no
    random numbers.

    Raises:
        LibraryChanged: gradients are not summed over ranks and microbatches, or DeepSpeed lacks a private name.
    """
    model = _UnitGradientNetwork()
    threshold = 1 if config.stage == 3 else None  # the parameter of 1 element stays whole, that of 5 is sharded
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
            f"the summation of gradients at ZeRO {config.stage} in {config.precision} over {engine.world} ranks "
            f"(norm {found:g} instead of {expected:g})",
        )
    _verified_ranks[config] = max(verified_rank_count(config), engine.world)
    return float(error)
