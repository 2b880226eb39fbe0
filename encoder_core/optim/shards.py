"""The layout of parameters in ZeRO's flat partitions, for optimizers that need sums over whole parameters.

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
    """The position of a range of a parameter in a flat tensor.

    Elements [start, stop) of the flat tensor are elements [first, first + stop - start) of the flattened parameter
    number `parameter`.
    """

    parameter: int
    first: int
    start: int
    stop: int

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the segment's view [stop - start] of `flat`, or of another tensor with the same layout."""
        return flat.view(-1)[self.start : self.stop]


class ShardedOptimizer(Optimizer):
    """Base of optimizers that need whole parameters. Until `shard` is called, each tensor counts as one parameter.

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
        # StableAdamW's kernel layouts (`Blocks`), cached by flat tensor at the first update.
        self._layouts: dict[Tensor, Any] = {}
        self._sharded = False
        self._ranks: dist.ProcessGroup | None = None

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        shapes: Sequence[tuple[int, ...]],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Set which ranges of which parameters lie in this rank's flat tensors. Collective.

        Args:
            segments: for every flat tensor of this rank, one range of every parameter that lies in that tensor on any
                rank, in the same order on all ranks; the range is empty if this rank holds none of the parameter.
                Elements in no range are padding.
            shapes: shapes of all parameters; the index is the parameter's number, the same on all ranks.
            ranks: process group that shares the parameters; None for the default group.
        """
        self._segments, self._shapes, self._ranks = segments, shapes, ranks
        self._layouts = {}
        self._sharded = True

    def _segments_in(self, p: Tensor) -> Sequence[ShardSegment]:
        """Return the segments of the flat tensor `p`.

        Raises:
            TrainingError: `shard` did not describe the tensor.
        """
        if p not in self._segments:
            name = type(self).__name__
            raise TrainingError(
                f"{name} was given a flat tensor of {p.numel()} elements but not which parameters they belong to",
                remedy=f"call {name}.shard with the segments of every partition once the engine is built",
            )
        return self._segments[p]

    def _square_sums(self, rows: Sequence[Sequence[Tensor]], params: Sequence[Tensor]) -> Tensor:
        """Return [rows, parameters] float64, the sums of squares over whole parameters. Each row of `rows` is a list
        of tensors with the layout of `params`, such as weights or gradients.

        Collective if sharded: each rank adds up its own ranges, and one all-reduce adds up the table. The sum is 0 for
        parameters in none of `params`.
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
        """Add up `table` over the ranks, in place, if sharded. Without `torch.distributed` there is one rank."""
        if self._sharded and dist.is_initialized():
            dist.all_reduce(table, group=self._ranks)

    def _scale_parameters(self, tensors: Sequence[Tensor], params: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply each parameter's part of `tensors`, laid out as `params`, by its factor ([parameters]), in place."""
        for p, tensor in zip(params, tensors, strict=True):
            for segment in self._segments_in(p):
                segment.view_in(tensor).mul_(factors[segment.parameter])

    def _parameter_sizes(self, device: torch.device) -> Tensor:
        """Return [parameters] float64, the number of elements of each whole parameter."""
        return torch.tensor([prod(shape) for shape in self._shapes], dtype=torch.float64, device=device)


def _square_sum(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()
