"""All ranks' examples of a step brought together, for objectives whose loss couples them (`CoupledObjective`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from encoder_core.objectives.losses import AllExamples


@dataclass(frozen=True)
class RankExamples(AllExamples):
    """`AllExamples` in the order of the logical microbatches, which were dealt to the ranks round-robin.

    Attributes:
        at: where this rank's examples lie among all.
        counts: examples of each rank.
        order: [N] the place of each example, if all examples of rank 0 come first, then those of rank 1, ...
    """

    at: Int[Tensor, " own"]
    counts: tuple[int, ...]
    order: Int[Tensor, " all"]

    @classmethod
    def meet(cls, own: Sequence[Tensor]) -> tuple["RankExamples", Tensor]:
        """Gathers the numbers of examples of all ranks. Returns the order, and this rank's examples joined.

        Args:
            own: [examples, ...] of each microbatch of this rank. Every rank passes as many, idle ones included; an idle
                microbatch may have another shape beyond its first dimension. Collective.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sizes, device = [len(tensor) for tensor in own], own[0].device
        told = torch.tensor([*sizes, *own[sizes.index(max(sizes))].shape[1:]], device=device)
        table = torch.stack(_all_gather(told, world)).tolist()
        at, order = _places([row[: len(sizes)] for row in table], rank)
        joined = torch.cat([tensor for tensor in own if len(tensor)] or [own[0].new_zeros(0)])
        shape = [max(column) for column in list(zip(*table, strict=True))[len(sizes) :]]
        counts = tuple(sum(row[: len(sizes)]) for row in table)
        return cls(at.to(device), counts, order.to(device)), joined.reshape(sum(sizes), *shape)

    @classmethod
    def alone(cls, own: Tensor) -> tuple["RankExamples", Tensor]:
        """As if one microbatch's examples [examples, ...] were all that there are. Not collective."""
        every = torch.arange(len(own), device=own.device)
        return cls(every, (len(own),), every), own

    def gather(self, own: Tensor) -> Tensor:
        """All examples' [N, ...] from each rank's own [n, ...]. Collective."""
        if len(self.counts) == 1:
            return own
        padded = own.new_zeros((max(self.counts), *own.shape[1:]))
        padded[: len(own)] = own
        parts = _all_gather(padded, len(self.counts))
        return torch.cat([part[:n] for part, n in zip(parts, self.counts, strict=True)])[self.order]


def _places(sizes: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """`at` of `rank`, and `order`, from the numbers of examples of [rank][microbatch]."""
    begins = [sum(sum(row) for row in sizes[:r]) for r in range(len(sizes))]
    order, at, place = list[Tensor](), list[Tensor](), 0
    for turn in range(len(sizes[0])):
        for r, row in enumerate(sizes):
            order.append(torch.arange(begins[r], begins[r] + row[turn]))
            if r == rank:
                at.append(torch.arange(place, place + row[turn]))
            begins[r] += row[turn]
            place += row[turn]
    return torch.cat(at), torch.cat(order)


def _all_gather(own: Tensor, world: int) -> list[Tensor]:
    if world == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    return parts
