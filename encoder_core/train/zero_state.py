"""Locates each parameter's fp32 state (master weight, moments) at every ZeRO stage, as ranges of flat tensors.

DeepSpeed stores master weights and moments in flat partitions whose layout depends on the stage, the world size and
the parameter groups. An `OwnedRange` is a contiguous range of a parameter that this rank owns. Checkpoints read and
write only such ranges, so they do not depend on the topology. The optimizer decides what state a parameter has: two
moments, or one momentum for Muon's hidden matrices.

A frozen parameter is unknown to the optimizer and has no master weight and no moments. A checkpoint stores its working
weight as the master weight and zeros as moments, as if training of the parameter began at that step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from encoder_core.optim.adamw import MOMENTS
from encoder_core.optim.average import AVERAGE
from encoder_core.optim.groups import hidden_matrices
from encoder_core.optim.muon import MOMENTUM
from encoder_core.train.deepspeed_internals import (
    FlatPart,
    Layout,
    local_shard,
    optimizer_state,
    owned_part,
    working_flats,
)


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + length) of the flattened parameter (or memory) `name`.

    The fragments of all ranks cover each parameter exactly once.

    Attributes:
        name: name of the parameter in `named_parameters`.
        start: index of the first element in the flattened parameter.
        tensors: 1-D float32 tensors of equal length, one for each kind of state: "master" (the weight that the
            optimizer updates), its moments ("exp_avg" and "exp_avg_sq", or "momentum") and, if the run keeps one, its
            "average"; for XLNet's memory only "memory". They may be views of the trainer's tensors.
    """

    name: str
    start: int
    tensors: dict[str, Float32[Tensor, " length"]]


MASTER = "master"  # kind of state: the fp32 weight that the optimizer updates
KINDS = (MASTER, *MOMENTS)
"""Kinds of state that every optimizer has for a parameter; only Muon's hidden matrices have others."""
ALL_KINDS = (*KINDS, MOMENTUM, AVERAGE)  # every kind that some parameter may have


def state_kinds(*, averaged: bool) -> tuple[str, ...]:
    """Return the kinds of state of every parameter that `own_kinds` does not list. `averaged`: whether the run keeps an
    average of its weights.
    """
    return (*KINDS, AVERAGE) if averaged else KINDS


def own_kinds(model: nn.Module, *, muon: bool, averaged: bool = False) -> dict[str, tuple[str, ...]]:
    """Return, by name, the kinds of state of the parameters whose kinds differ from `state_kinds`: Muon's hidden
    matrices, even frozen ones. The result is empty for other optimizers.
    """
    own = (MASTER, MOMENTUM, AVERAGE) if averaged else (MASTER, MOMENTUM)
    return dict.fromkeys(hidden_matrices(model), own) if muon else {}


ReadRange = Callable[[str, str, int, int], Tensor]
"""(parameter name, kind of state, start, stop) -> 1-D fp32 tensor, the elements of this range."""


class NamedParameter(NamedTuple):
    """A parameter, its name, and the kinds of its state."""

    name: str
    weight: nn.Parameter
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class OwnedRange:
    """A range of a trained parameter that a rank owns, with its state.

    Attributes:
        kinds: kinds of state.
        part: position of the range in the parameter and in a flat tensor of master weights.
        moments: optimizer state of the whole flat tensor, as far as it is allocated.
    """

    name: str
    kinds: tuple[str, ...]
    part: FlatPart
    moments: dict[str, Tensor]

    def fragment(self) -> Fragment:
        """Return views of the master weight and of each moment (zeros before the first update)."""
        tensors = {}
        for kind in self.kinds:
            found = self.part.flat if kind == MASTER else self.moments.get(kind)
            tensors[kind] = self.part.view(found) if found is not None else torch.zeros(self.part.length)
        return Fragment(self.name, self.part.start, tensors)

    def restore(self, kinds: Sequence[str], read: ReadRange) -> None:
        for kind in (kind for kind in self.kinds if kind in kinds):
            if kind != MASTER and kind not in self.moments:
                self.moments[kind] = torch.zeros_like(self.part.flat)
            target = self.part.flat if kind == MASTER else self.moments[kind]
            self.part.view(target).copy_(read(self.name, kind, self.part.start, self.part.stop))


@dataclass(frozen=True)
class FrozenRange:
    """A range of a frozen parameter that a rank owns. `part.flat` is the working weight, in any dtype."""

    name: str
    kinds: tuple[str, ...]
    part: FlatPart

    def fragment(self) -> Fragment:
        """Return the weight in fp32, as master weight and as average, and zeros as moments."""
        weight = self.part.view(self.part.flat).float()
        state = {k: weight if k in (MASTER, AVERAGE) else torch.zeros(self.part.length) for k in self.kinds}
        return Fragment(self.name, self.part.start, state)

    def restore(self, kinds: Sequence[str], read: ReadRange) -> None:
        if MASTER in kinds:
            self.part.view(self.part.flat).copy_(read(self.name, MASTER, self.part.start, self.part.stop))


def frozen_ranges(stage: int, named: Sequence[NamedParameter], rank: int, world: int) -> Iterator[FrozenRange]:
    """Yield the ranges of frozen parameters that rank `rank` of `world` owns. The ranks' ranges cover each parameter
    exactly once.
    """
    for name, p, kinds in named:
        if stage == 3:  # every rank holds 1/world of every parameter; the last shards are padded
            flat, size = local_shard(p)
            start = min(rank * flat.numel(), size)
            part = FlatPart(flat, start, min(flat.numel(), size - start), 0)
        else:
            part = _equal_share(p, rank, world)
        if part.length > 0:
            yield FrozenRange(name, kinds, part)


def owned_ranges(
    optimizer: Any, layout: Layout, named: Sequence[NamedParameter], rank: int, world: int
) -> Iterator[OwnedRange]:
    """Yield the ranges of trained parameters that rank `rank` of `world` owns. The ranks' ranges cover each parameter
    exactly once.
    """
    unsharded = layout == "whole"
    state = optimizer_state(optimizer, layout)
    for name, p, kinds in named:
        part = _equal_share(p, rank, world) if unsharded else owned_part(optimizer, p, layout, rank)
        if part is not None and part.length > 0:
            yield OwnedRange(name, kinds, part, state[part.flat])


def _equal_share(p: nn.Parameter, rank: int, world: int) -> FlatPart:
    """Return the range that a rank saves of a parameter that every rank holds whole."""
    start, stop = p.numel() * rank // world, p.numel() * (rank + 1) // world
    return FlatPart(p, start, stop - start, start)


def working_buffers(
    optimizer: Any, weights: Sequence[Tensor], frozen: Sequence[Tensor], layout: Layout
) -> Sequence[Tensor]:
    """Return the tensors that hold all `weights` at stages 0 to 2.

    Stages 1 and 2 store the trained weights of a parameter group in one tensor; `frozen` weights are separate tensors.
    """
    return weights if layout == "whole" else [*working_flats(optimizer, layout), *frozen]
