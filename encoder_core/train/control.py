"""What ranks tell each other beside gradients: one small gather before a step, one after.

A gather (not a reduction) of float64 rows keeps the result independent of the collective's algorithm: every rank
sums the same rows in rank order, so figures are bit-identical on all of them. It runs on a gloo group of its own:
the numbers live on the host anyway, and nothing else can interleave with it.
"""

from collections.abc import Sequence
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
