"""LAMB (You et al. 2020). Trust ratios are of whole parameters, even if ZeRO shards them.

LAMB's norms need sums of squares over whole parameters, which `encoder_core.optim.shards` adds up over ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from encoder_core.layers.torch_internals import add_to_each
from encoder_core.optim.adamw import adam_direction
from encoder_core.optim.settings import LambConfig
from encoder_core.optim.shards import ShardedOptimizer
from encoder_core.optim.updates import group_defaults, tensors_to_update

TRUST_RATIO = "trust_ratio"  # key of a parameter group: whether updates are scaled by |w| / |update|


class Lamb(ShardedOptimizer):
    """Adam's direction, scaled for each parameter by |w| / |update| (You et al. 2020, algorithm 2; phi(x) = x):

        u = m / (sqrt(v) + eps) + wd w;   w = w - lr (|w| / |u|) u     (ratio 1 where either norm is 0)

    Groups with `trust_ratio` false (LayerNorm and biases) have ratio 1. State of a tensor, learning rate and update
    number are as in `AdamW`. If tensors are ZeRO's partitions, call `shard` to name the parameters that they hold.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: LambConfig) -> None:
        defaults = group_defaults(config, bias_correction=config.bias_correction)
        super().__init__(params, defaults | {TRUST_RATIO: True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = tensors_to_update(group)
            if not params:
                continue
            directions = [adam_direction(self.state, group, p) for p in params]
            if group[TRUST_RATIO]:
                ratios = _trust_ratios(self._square_sums((params, directions), params))
                self._scale_parameters(directions, params, ratios)
            add_to_each(params, directions, -group["lr"])


def _trust_ratios(squares: Tensor) -> Tensor:
    """Return [parameters] float32 from the [2, parameters] float64 squared norms of weights and directions."""
    weights, updates = squares.sqrt()
    usable = (weights > 0) & (updates > 0)
    return torch.where(usable, weights / torch.where(usable, updates, 1.0), 1.0).float()
