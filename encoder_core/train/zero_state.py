"""Where each parameter's fp32 state lies at every ZeRO stage, as ranges of flat tensors.

DeepSpeed stores master weights and moments in flat partitions whose layout depends on the stage, the world size and
the groups. An `OwnedRange` is one contiguous part of them that this rank owns. Checkpoints read and write only such
ranges, so they do not depend on the topology. The optimizer decides what state a parameter has: two moments, or one
momentum for Muon's hidden matrices.

A frozen parameter is unknown to the optimizer and has no master weight and no moments. In a checkpoint its working
weight stands for the master weight, and zeros stand for the moments, as if training it began now.
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

    The fragments of a name are disjoint and, over all ranks, cover it.

    Attributes:
        name: name of the parameter in `named_parameters`.
        start: index of the first element in the flattened parameter.
        tensors: 1-D float32 tensors of equal length, one for each kind of state: "master" (the weight that the
            optimizer updates), its moments ("exp_avg" and "exp_avg_sq", or "momentum") and, if the run keeps one, its
            "average"; for memory only "memory". They may share storage with the trainer.
    """

    name: str
    start: int
    tensors: dict[str, Float32[Tensor, " length"]]


MASTER = "master"
KINDS = (MASTER, *MOMENTS)
"""Kinds of state of a parameter with every optimizer, except Muon's hidden matrices."""
ALL_KINDS = (*KINDS, MOMENTUM, AVERAGE)


def state_kinds(*, averaged: bool) -> tuple[str, ...]:
    """Return the kinds of state of parameters that are not in `own_kinds`. `averaged`: whether the run keeps an average
    of its weights.
    """
    return (*KINDS, AVERAGE) if averaged else KINDS


def own_kinds(model: nn.Module, *, muon: bool, averaged: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the kinds of state, by name, of parameters whose kinds differ from `state_kinds`, including frozen ones.

    With `muon` these are the hidden matrices.
    """
    own = (MASTER, MOMENTUM, AVERAGE) if averaged else (MASTER, MOMENTUM)
    return dict.fromkeys(hidden_matrices(model), own) if muon else {}


ReadRange = Callable[[str, str, int, int], Tensor]
"""(parameter name, kind, start, stop) -> 1-D fp32 tensor of these flat elements."""


class NamedParameter(NamedTuple):
    """A parameter, its name, and the kinds of its state."""

    name: str
    weight: nn.Parameter
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class OwnedRange:
    """One owned range of a trained parameter.

    Attributes:
        kinds: kinds of state.
        part: which elements of the parameter lie where in a flat tensor of master weights.
        moments: moments of the flat tensor that exist so far.
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
    """One owned range of a frozen parameter. The flat tensor of its `part` is its working weight, in any dtype."""

    name: str
    kinds: tuple[str, ...]
    part: FlatPart

    def fragment(self) -> Fragment:
        """Return a copy of the weight, which is its own average, and zeros for the moments."""
        weight = self.part.view(self.part.flat).float()
        state = {k: weight if k in (MASTER, AVERAGE) else torch.zeros(self.part.length) for k in self.kinds}
        return Fragment(self.name, self.part.start, state)

    def restore(self, kinds: Sequence[str], read: ReadRange) -> None:
        if MASTER in kinds:
            self.part.view(self.part.flat).copy_(read(self.name, MASTER, self.part.start, self.part.stop))


def frozen_ranges(stage: int, named: Sequence[NamedParameter], rank: int, world: int) -> Iterator[FrozenRange]:
    """Yield the ranges that rank `rank` of `world` owns of frozen parameters. Over all ranks, each element occurs
    once.
    """
    for name, p, kinds in named:
        if stage == 3:  # 1/world of every parameter, the last piece padded
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
    """Yield the ranges that rank `rank` of `world` owns of trained parameters. Over all ranks they cover each exactly
    once.
    """
    unsharded = layout == "whole"
    state = optimizer_state(optimizer, layout)
    for name, p, kinds in named:
        part = _equal_share(p, rank, world) if unsharded else owned_part(optimizer, p, layout, rank)
        if part is not None and part.length > 0:
            yield OwnedRange(name, kinds, part, state[part.flat])


def _equal_share(p: nn.Parameter, rank: int, world: int) -> FlatPart:
    """Return the part that a rank answers for of a parameter that lies whole on every rank."""
    start, stop = p.numel() * rank // world, p.numel() * (rank + 1) // world
    return FlatPart(p, start, stop - start, start)


def working_buffers(
    optimizer: Any, weights: Sequence[Tensor], frozen: Sequence[Tensor], layout: Layout
) -> Sequence[Tensor]:
    """Return the tensors that hold all `weights` at stages 0 to 2.

    Stages 1 and 2 store the weights of a group in one tensor, without the `frozen` ones.
    """
    return weights if layout == "whole" else [*working_flats(optimizer, layout), *frozen]
