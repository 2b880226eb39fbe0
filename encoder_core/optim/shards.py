"""Where whole parameters lie in ZeRO's flat partitions, for optimizers that need more than single elements.

ZeRO passes an optimizer flat tensors in which several parameters lie end to end, each possibly split between ranks.
AdamW works on single elements. LAMB and StableAdamW need a sum over each whole parameter; Muon needs the matrix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from encoder_core.errors import TrainingError


@dataclass(frozen=True)
class ShardSegment:
    """A range of a parameter in a flat tensor.

    Elements [start, stop) of the flat tensor are elements [first, first + stop - start) of the flattened parameter
    number `parameter`.
    """

    parameter: int
    first: int
    start: int
    stop: int

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the view [stop - start] of a tensor with the layout of the flat one."""
        return flat.view(-1)[self.start : self.stop]


class ShardedOptimizer(Optimizer):
    """An optimizer that treats each parameter as a whole. Before `shard` is called, each tensor is one parameter.

    `step` applies one update to every tensor of the active update group that has a gradient. If sharded, all ranks must
    call it. It raises TrainingError if the update's number was not set, or `shard` did not describe a flat tensor.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        whole = [p for group in self.param_groups for p in group["params"]]
        self._segments: Mapping[Tensor, Sequence[ShardSegment]] = {
            p: (ShardSegment(i, 0, 0, p.numel()),) for i, p in enumerate(whole)
        }
        self._shapes: Sequence[tuple[int, ...]] = [tuple(p.shape) for p in whole]
        # What a kernel needs to know of a tensor's ranges, once it was used.
        self._layouts: dict[Tensor, Any] = {}
        self._sharded = False
        self._ranks: dist.ProcessGroup | None = None

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        shapes: Sequence[tuple[int, ...]],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Tell the optimizer which ranges of which parameters lie in this rank's flat tensors. Collective.

        Args:
            segments: for every flat tensor of this rank, one range of every parameter that lies in that tensor on any
                rank, in the same order on all ranks; empty if this rank holds nothing of it. Elements in no range are
                padding.
            shapes: shapes of all parameters, by number. Numbers mean the same on all ranks.
            ranks: process group that shares the parameters; None for the default group.
        """
        self._segments, self._shapes, self._ranks = segments, shapes, ranks
        self._layouts = {}
        self._sharded = True

    def _segments_in(self, p: Tensor) -> Sequence[ShardSegment]:
        """Return the ranges in a flat tensor.

        Raises:
            TrainingError: `shard` did not describe the tensor, which must not be mistaken for one parameter.
        """
        if p not in self._segments:
            name = type(self).__name__
            raise TrainingError(
                f"{name} was given a flat tensor of {p.numel()} elements but not which parameters they belong to",
                remedy=f"call {name}.shard with the segments of every partition once the engine is built",
            )
        return self._segments[p]

    def _square_sums(self, rows: Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> Tensor:
        """Return [rows, parameters] float64, the sums of squares over whole parameters, for each row of tensors laid
        out as `params`.

        Collective if sharded; 0 for parameters that lie in none of `params`. Each rank adds up its own ranges, and
        one all-reduce of this small table does the rest.
        """
        device = params[0].device
        table = torch.zeros(len(rows), len(self._shapes), dtype=torch.float64, device=device)
        for row, tensors in zip(table, rows, strict=True):
            for p, tensor in zip(params, tensors, strict=True):
                for segment in self._segments_in(p):
                    row[segment.parameter] += _square_sum(segment.view_in(tensor))
        self._sum_over_ranks(table)
        return table

    def _sum_over_ranks(self, table: Tensor) -> None:
        """Add up a table over the ranks, in place, if sharded. A process without process groups is the only rank."""
        if self._sharded and dist.is_initialized():
            dist.all_reduce(table, group=self._ranks)

    def _scale_parameters(self, tensors: Sequence[Tensor], params: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply each parameter's range of tensors laid out as `params` by its factor in `factors`, [parameters]."""
        for p, tensor in zip(params, tensors, strict=True):
            for segment in self._segments_in(p):
                segment.view_in(tensor).mul_(factors[segment.parameter])

    def _parameter_sizes(self, device: torch.device) -> Tensor:
        """Return [parameters] float64, the number of elements of each."""
        return torch.tensor([prod(shape) for shape in self._shapes], dtype=torch.float64, device=device)


def _square_sum(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()
