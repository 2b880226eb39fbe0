"""What ranks tell each other besides gradients: one small gather before a step, and one after it.

A gather (not a reduction) of float64 rows keeps the result independent of the collective's algorithm: every rank
sums the same rows in rank order, so figures are bit-identical on all of them. It runs on a gloo group of its own:
the numbers live on the host anyway, and nothing else can interleave with it.

Before a step (`exchange`): target counts, and the flags on which all ranks must act alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor


@dataclass(frozen=True)
class Control:
    """This process's place among the ranks, and their private group (None for a single process)."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls) -> "Control":
        """Every rank calls this once, after `torch.distributed` is initialised (or without it, alone)."""
        if not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))

    def table(self, row: Sequence[float]) -> Float64[Tensor, "world columns"]:
        """All ranks' rows, in rank order. Integers up to 2**53 pass exactly."""
        mine = torch.tensor(row, dtype=torch.float64)
        if self.group is None:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=self.group)
        return torch.stack(rows)


@dataclass(frozen=True)
class Signals:
    """What all ranks know before a step's first backward.

    Attributes:
        stop: some rank was asked to stop, so no rank runs the step.
        save: a checkpoint is due after this step. Rank 0 decides, so that only one clock counts.
        saved: every rank has finished uploading its part of the pending checkpoint, or has failed.
        fits: every rank's largest microbatch fits into its memory, as far as that is looked at beforehand.
        wait: the longest wait for data, seconds.
        tokens: tokens of the global batch.
        digest: sum of the rows' checksums, a fingerprint of the bytes trained on.
        counts: targets of the global batch, per loss term.
    """

    stop: bool
    save: bool
    saved: bool
    fits: bool
    wait: float
    tokens: int
    digest: int
    counts: dict[str, float]


def exchange(
    control: Control,
    *,
    stop: bool,
    save: bool,
    saved: bool,
    fits: bool,
    wait: float,
    tokens: int,
    digest: int,
    counts: Mapping[str, int],
) -> Signals:
    """Send this rank's figures and return those of all ranks. Collective: every rank calls it once a step, with the
    same term names in `counts`.
    """
    names = sorted(counts)
    flags = [stop, save, saved, fits]
    table = control.table([*flags, wait, tokens, digest, *(counts[name] for name in names)])
    totals = table.sum(dim=0).tolist()
    return Signals(
        stop=totals[0] > 0,
        save=bool(table[0, 1]),
        saved=int(totals[2]) == control.world,
        fits=int(totals[3]) == control.world,
        wait=float(table[:, 4].max()),
        tokens=int(totals[5]),
        digest=int(totals[6]),
        counts=dict(zip(names, totals[7:], strict=True)),
    )
