"""Exchanges figures (numbers and flags) and examples, but not gradients, between ranks.

Ranks gather a row of figures before each step and another after it. The figures before a step (`exchange_signals`) are
counts of targets, and flags such as "stop", on which all ranks must act in the same step. If a loss compares the
examples of all ranks (`CoupledObjective`), ranks gather these, too.

Figures are gathered as float64 rows, and every rank sums the same rows in rank order. So sums are bit-identical on all
ranks, whatever algorithm the collective uses. Figures have a gloo group of their own: they are on the host anyway, and
no other collective can interleave with theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float64, Int
from torch import Tensor

from encoder_core.objectives.modules.losses import AllExamples
from encoder_core.train.groups import ensure_not_aborted


@dataclass(frozen=True)
class RankGroup:
    """The rank of this process, and the gloo group for figures; the group is None for a single process."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls) -> "RankGroup":
        """Create the gloo group for figures. Every rank must call this once, after `torch.distributed` is initialised;
        a process without `torch.distributed` is the only rank.
        """
        if not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))

    def gather_rows(self, row: Sequence[float]) -> Float64[Tensor, "world columns"]:
        """Return the rows of all ranks, in rank order. Integers up to 2**53 are exact. Raises GroupsAborted if
        collectives were aborted, because the row may be computed from their incomplete results.
        """
        ensure_not_aborted()
        mine = torch.tensor(row, dtype=torch.float64)
        if self.group is None:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows)


@dataclass(frozen=True)
class StepSignals:
    """Figures and flags before a step: first those of one rank, then, after the exchange, those of all ranks together.

    Attributes:
        stop: whether any rank was asked to stop; if so, no rank runs the step.
        save: whether a checkpoint is due after this step; rank 0 decides, by its clock.
        saved: whether every rank has uploaded its part of the pending checkpoint, or failed to.
        fits: whether every rank's largest microbatch fits into its memory, as far as that was checked.
        keep: whether the state is copied to memory before this step; every rank must agree.
        wait: longest wait of any rank for data, in seconds.
        tokens: number of tokens in the batch.
        digest: sum of the checksums of the batch's rows, a fingerprint of the data that the step trains on.
        counts: number of targets in the batch, by loss term.
    """

    stop: bool
    save: bool
    saved: bool
    fits: bool
    keep: bool
    wait: float
    tokens: int
    digest: int
    counts: Mapping[str, float]


def exchange_signals(control: RankGroup, own: StepSignals) -> StepSignals:
    """Send this rank's signals, and return the combined signals of all ranks. Collective: every rank calls it once a
    step, with the same term names in `counts`.
    """
    names = sorted(own.counts)
    flags = [own.stop, own.save, own.saved, own.fits, own.keep]
    table = control.gather_rows([*flags, own.wait, own.tokens, own.digest, *(own.counts[name] for name in names)])
    totals = table.sum(dim=0).tolist()
    return StepSignals(
        stop=totals[0] > 0,
        save=bool(table[0, 1]),
        saved=int(totals[2]) == control.world,
        fits=int(totals[3]) == control.world,
        keep=int(totals[4]) == control.world,
        wait=float(table[:, 5].max()),
        tokens=int(totals[6]),
        digest=int(totals[7]),
        counts=dict(zip(names, totals[8:], strict=True)),
    )


@dataclass(frozen=True)
class RankExamples(AllExamples):
    """`AllExamples` in the order of the logical microbatches, which were assigned to the ranks round-robin.

    Attributes:
        at: indices of this rank's examples among all.
        counts: number of examples of each rank.
        order: [N], for each example its index in the concatenation of the ranks' examples (rank 0's first).
    """

    at: Int[Tensor, " own"]
    counts: tuple[int, ...]
    order: Int[Tensor, " all"]

    @classmethod
    def from_all_ranks(cls, own: Sequence[Tensor]) -> tuple["RankExamples", Tensor]:
        """Gather the numbers of examples of all ranks. Return the examples' order, and this rank's examples
        concatenated. Collective.

        Args:
            own: [examples, ...] of each microbatch of this rank. Every rank passes equally many microbatches, including
                idle ones; an idle microbatch may have another shape beyond its first dimension.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sizes, device = [len(tensor) for tensor in own], own[0].device
        shape_record = torch.tensor([*sizes, *own[sizes.index(max(sizes))].shape[1:]], device=device)
        table = torch.stack(_all_gather(shape_record, world)).tolist()
        at, order = _example_order([row[: len(sizes)] for row in table], rank)
        joined = torch.cat([tensor for tensor in own if len(tensor)] or [own[0].new_zeros(0)])
        shape = [max(column) for column in list(zip(*table, strict=True))[len(sizes) :]]
        counts = tuple(sum(row[: len(sizes)]) for row in table)
        return cls(at.to(device), counts, order.to(device)), joined.reshape(sum(sizes), *shape)

    @classmethod
    def from_one_microbatch(cls, own: Tensor) -> tuple["RankExamples", Tensor]:
        """Treat the examples [examples, ...] of one microbatch as the whole global batch. Not collective."""
        every = torch.arange(len(own), device=own.device)
        return cls(every, (len(own),), every), own

    def gather(self, own: Tensor) -> Tensor:
        if len(self.counts) == 1:
            return own
        padded = own.new_zeros((max(self.counts), *own.shape[1:]))
        padded[: len(own)] = own
        parts = _all_gather(padded, len(self.counts))
        return torch.cat([part[:n] for part, n in zip(parts, self.counts, strict=True)])[self.order]


def _example_order(sizes: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """Return `RankExamples.at` of `rank`, and `order`. `sizes`: numbers of examples, by rank and microbatch."""
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
