"""LAMB (You et al. 2020), its trust ratios those of whole parameters however the state is sharded.

ZeRO hands an optimizer flat partitions in which several parameters lie end to end, each possibly cut between
ranks. The norms LAMB needs are sums of squares, so each rank adds up its own ranges and one all-reduce of a
small float64 table gives every rank the norms of whole parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.optim.optimizer import Optimizer

from encoder_core.errors import TrainingError
from encoder_core.optim.adamw import Beta, Decayed, moments
from encoder_core.optim.updates import ACTIVE, LR_SCALE, UPDATE, due, update_count

TRUST_RATIO = "trust_ratio"


class LambConfig(BaseModel):
    """Settings of LAMB; the defaults are ALBERT's (google-research/albert, lamb_optimizer.py).

    Attributes:
        lr: peak learning rate; the schedule scales it.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: added to the update before its norm is taken.
        decayed: the parameters it acts on.
        clip: the gradient's global norm is cut to this before the update; null for no clipping.
        bias_correction: divide the moments by 1 - beta^t (the paper); false is ALBERT's update.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(gt=0.0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    decayed: Decayed = "no_bias_norm"
    clip: float | None = Field(default=1.0, gt=0.0)
    bias_correction: bool = False


@dataclass(frozen=True)
class ShardSegment:
    """Elements [start, stop) of a flat tensor belong to parameter number `parameter`."""

    parameter: int
    start: int
    stop: int


class Lamb(Optimizer):
    """Adam's direction, scaled per parameter by |w| / |update| (You et al. 2020, algorithm 2; phi(x) = x).

        u = m / (sqrt(v) + eps) + wd w;   w = w - lr (|w| / |u|) u     (ratio 1 where either norm is 0)

    Groups with `trust_ratio` false (LayerNorm and biases) have ratio 1. State per tensor, learning rate and
    update number as in `AdamW`. Where tensors are ZeRO's partitions, `shard` must say what lies in them.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: LambConfig) -> None:
        defaults = {
            "lr": config.lr,
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "bias_correction": config.bias_correction,
            TRUST_RATIO: True,
            LR_SCALE: 1.0,
            UPDATE: 0,
            ACTIVE: True,
        }
        super().__init__(params, defaults)
        whole = [p for group in self.param_groups for p in group["params"]]
        self._segments: Mapping[Tensor, Sequence[ShardSegment]] = {
            p: (ShardSegment(i, 0, p.numel()),) for i, p in enumerate(whole)
        }
        self._parameters = len(whole)
        self._sharded = False
        self._ranks: dist.ProcessGroup | None = None

    def shard(
        self,
        segments: Mapping[Tensor, Sequence[ShardSegment]],
        parameters: int,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Say which ranges of which parameters lie in this rank's flat tensors.

        Args:
            segments: for every flat tensor of this rank, its ranges; what no range covers is padding.
            parameters: number of parameters of the model. Parameter numbers mean the same on all ranks.
            ranks: the process group that shares the parameters; None for the default group.
        """
        self._segments, self._parameters, self._ranks = segments, parameters, ranks
        self._sharded = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every tensor of the active update group that has a gradient. Sharded, all ranks call it
        together.

        Raises:
            TrainingError: the update's number was not set, or a flat tensor was not described by `shard`.
        """
        for group in self.param_groups:
            params = due(group)
            if not params:
                continue
            directions = [self._direction(group, p) for p in params]
            if group[TRUST_RATIO]:
                self._scale(params, directions)
            torch._foreach_add_(params, directions, alpha=-group["lr"])

    def _direction(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """Adam's step with decay added, in a new tensor shaped like `p`; the moments move."""
        count = update_count(group)
        state = moments(self.state, p)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        gradient = p.grad
        assert gradient is not None  # step() keeps only those with one
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = group["bias_correction"]
        bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if corrected else (1.0, 1.0)
        root = second.sqrt().mul_(bias2**-0.5).add_(group["eps"])
        return torch.div(first, root, out=root).mul_(1 / bias1).add_(p, alpha=group["weight_decay"])

    def _scale(self, params: Sequence[Tensor], directions: Sequence[Tensor]) -> None:
        """Multiply each parameter's range of the directions by its trust ratio."""
        ranges = [self._ranges(p) for p in params]
        squares = torch.zeros(2, self._parameters, dtype=torch.float64, device=params[0].device)
        for p, direction, segments in zip(params, directions, ranges, strict=True):
            for segment in segments:
                squares[0, segment.parameter] += _square_sum(_part(p, segment))
                squares[1, segment.parameter] += _square_sum(_part(direction, segment))
        if self._sharded:
            dist.all_reduce(squares, group=self._ranks)
        ratios = _trust_ratios(squares)
        for direction, segments in zip(directions, ranges, strict=True):
            for segment in segments:
                _part(direction, segment).mul_(ratios[segment.parameter])

    def _ranges(self, p: Tensor) -> Sequence[ShardSegment]:
        if p not in self._segments:
            raise TrainingError(
                f"LAMB was handed a flat tensor of {p.numel()} elements and not told whose they are",
                remedy="call Lamb.shard with the segments of every partition once the engine is built",
            )
        return self._segments[p]


def _part(flat: Tensor, segment: ShardSegment) -> Tensor:
    return flat.view(-1)[segment.start : segment.stop]


def _square_sum(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _trust_ratios(squares: Tensor) -> Tensor:
    """[parameters] float32 from the [2, parameters] float64 squared norms of weights and directions."""
    weights, updates = squares.sqrt()
    usable = (weights > 0) & (updates > 0)
    return torch.where(usable, weights / torch.where(usable, updates, 1.0), 1.0).float()
