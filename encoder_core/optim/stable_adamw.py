"""StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2): AdamW whose learning rate is lowered, parameter by
parameter, where the gradient is larger than its second moment led to expect (AdaFactor's update clipping)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from encoder_core.layers.torch_internals import add_to_each
from encoder_core.optim.adamw import Beta, Decayed, decayed_direction
from encoder_core.optim.shards import ShardedOptimizer
from encoder_core.optim.updates import ACTIVE, LR_SCALE, UPDATE, due, update_count


class StableAdamWConfig(BaseModel):
    """Settings of StableAdamW; the defaults are those of its usual implementation (warner-benjamin/optimi).

    Attributes:
        lr: peak learning rate; the schedule scales it, and update clipping lowers it.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment; its square is the least that a squared gradient is compared with.
        weight_decay: decoupled, times the learning rate. A fully decoupled one, which a run multiplies by its share of
            the peak rate only (ModernBERT's 1e-5), is this one times the peak rate: give the quotient.
        decayed: the parameters it acts on.
        clip: the gradient's global norm is cut to this before the update; null, as published, for no clipping: that of
            updates takes its place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(gt=0.0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    eps: float = Field(default=1e-6, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    decayed: Decayed = "no_bias_norm"
    clip: float | None = Field(default=None, gt=0.0)


class StableAdamW(ShardedOptimizer):
    """AdamW with update clipping:

        rms = sqrt(mean(g^2 / max(v, eps^2)));   w = w - lr / max(1, rms) (m / (sqrt(v) + eps) + wd w)

    The mean is over a whole parameter; m and v are corrected for bias (the paper corrects the betas, which is the
    same). State per tensor, learning rate and update number as in `AdamW`, so a run may go on from AdamW's moments.
    Where tensors are ZeRO's partitions, `shard` must say what lies in them.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: StableAdamWConfig
    ) -> None:
        defaults = {
            "lr": config.lr,
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "bias_correction": True,
            LR_SCALE: 1.0,
            UPDATE: 0,
            ACTIVE: True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every tensor of the active update group that has a gradient. Sharded, all ranks call it
        together.

        Raises:
            TrainingError: the update's number was not set, or a flat tensor was not described by `shard`.
        """
        for group in self.param_groups:
            params = due(group)
            if params:
                directions = [decayed_direction(self.state, group, p) for p in params]
                self._multiply(directions, params, self._rate_shares(group, params))
                add_to_each(params, directions, -group["lr"])

    def _rate_shares(self, group: dict[str, Any], params: Sequence[Tensor]) -> Tensor:
        """[parameters] float32: 1 / max(1, rms), from moments that have moved."""
        surprises = [self._surprise(group, p) for p in params]
        squares = self._square_sums((surprises,), params)[0]
        mean = squares / self._sizes(squares.device).clamp(min=1)
        return mean.sqrt().clamp(min=1).reciprocal().float()

    def _surprise(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """g / max(sqrt(v), eps), in a new tensor shaped like `p`."""
        expected = self.state[p]["exp_avg_sq"] / (1 - group["betas"][1] ** update_count(group))
        assert p.grad is not None  # `due` keeps only those with one
        return torch.div(p.grad, expected.sqrt_().clamp_(min=group["eps"]), out=expected)
