"""AdamW (Loshchilov & Hutter 2019), BERT's AdamW without bias correction, and StableAdamW.

StableAdamW (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2) is AdamW with AdaFactor's update clipping: it lowers
the learning rate of a parameter whose gradient is larger than its second moment predicts.

All store two moments for each parameter. LAMB's moments have the same names, in memory and in checkpoints.
"""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from encoder_core.layers.gpu_attention import has_triton
from encoder_core.layers.kernel_choice import pick
from encoder_core.layers.torch_internals import add_to_each, fused_adamw
from encoder_core.optim.settings import AdamWConfig, StableAdamWConfig
from encoder_core.optim.shards import ShardedOptimizer
from encoder_core.optim.updates import group_defaults, next_update_number, tensors_to_update

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the first and the second moment in a tensor's state


def moments(state: MutableMapping[Tensor, dict[str, Tensor]], p: Tensor) -> dict[str, Tensor]:
    """Return the moments of `p` by name; they are created as zeros before its first update."""
    own = state[p]
    for name in MOMENTS:
        if name not in own:
            own[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return own


class AdamW(Optimizer):
    """AdamW as one fused kernel over each tensor, on CPU and GPU; moments have the tensor's dtype.

    State of a tensor: `exp_avg` and `exp_avg_sq`, of its shape. `encoder_core.optim.updates.set_update` sets the
    learning rate and the number of the update. Under DeepSpeed the tensors are ZeRO's flat partitions.

    With bias correction the update is torch.optim.AdamW's. Without it, as in google-research/bert (optimization.py):

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = p - lr (m / (sqrt(v) + eps) + wd p)
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: AdamWConfig) -> None:
        super().__init__(params, group_defaults(config, bias_correction=config.bias_correction))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update to every tensor of the active update group that has a gradient.

        Raises:
            TrainingError: the update's number was not set.
        """
        update_adamw(self.state, self.param_groups)


def update_adamw(state: MutableMapping[Tensor, dict[str, Tensor]], groups: Iterable[dict[str, Any]]) -> None:
    """Apply one AdamW update, in place, to the tensors of these parameter groups and to their moments."""
    count: Tensor | None = None
    for group in groups:
        if not (params := tensors_to_update(group)):
            continue
        # Infinity turns bias correction off: the kernel divides by 1 - beta^count, which is then 1.
        number = next_update_number(group) if group["bias_correction"] else math.inf
        # All active groups have the same update number (`set_update`), so one tensor holds it for all launches.
        count = torch.full((), number, device=params[0].device) if count is None else count
        states = [moments(state, p) for p in params]
        beta1, beta2 = group["betas"]
        fused_adamw(
            params,
            [p.grad for p in params],
            [own["exp_avg"] for own in states],
            [own["exp_avg_sq"] for own in states],
            [],
            [count] * len(params),
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def adam_direction(state: MutableMapping[Tensor, dict[str, Tensor]], group: dict[str, Any], p: Tensor) -> Tensor:
    """Update the moments of `p`, and return m / (sqrt(v) + eps) + wd p as a new tensor. `p` is not changed."""
    count = next_update_number(group)
    own = moments(state, p)
    first, second = own["exp_avg"], own["exp_avg_sq"]
    beta1, beta2 = group["betas"]
    gradient = p.grad
    assert gradient is not None  # `tensors_to_update` keeps only tensors with a gradient
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrected = group["bias_correction"]
    bias1, bias2 = (1 - beta1**count, 1 - beta2**count) if corrected else (1.0, 1.0)
    root = second.sqrt().mul_(bias2**-0.5).add_(group["eps"])
    return torch.div(first, root, out=root).mul_(1 / bias1).add_(p, alpha=group["weight_decay"])


class StableAdamW(ShardedOptimizer):
    """AdamW with update clipping:

        rms = sqrt(mean(g^2 / max(v, eps^2)));   w = w - lr / max(1, rms) (m / (sqrt(v) + eps) + wd w)

    The mean is over a whole parameter; m and v are corrected for bias (the paper corrects the betas, which is
    equivalent). State of a tensor, learning rate and update number are as in `AdamW`, so a run can continue from
    AdamW's moments. If tensors are ZeRO's partitions, call `shard` to name the parameters that they hold.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: StableAdamWConfig) -> None:
        super().__init__(params, group_defaults(config, bias_correction=True))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = tensors_to_update(group)
            if params and _uses_fused_kernels(params):
                self._update_fused(group, params)
            elif params:
                directions = [adam_direction(self.state, group, p) for p in params]
                self._scale_parameters(directions, params, self._clipping_factors(group, params))
                add_to_each(params, directions, -group["lr"])

    def _update_fused(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        from encoder_core.kernels import stable_adamw as kernels

        next_update_number(group)  # raises an error if the number was not set
        squares = torch.zeros(len(self._shapes), dtype=torch.float64, device=params[0].device)
        for p in params:
            if p not in self._layouts:
                ranges = [(s.start, s.stop, s.parameter, prod(self._shapes[s.parameter])) for s in self._segments_in(p)]
                self._layouts[p] = kernels.split_into_blocks(ranges, p.device)
            assert p.grad is not None  # `tensors_to_update` keeps only tensors with a gradient
            kernels.update_moments(p.grad, moments(self.state, p), self._layouts[p], squares, group)
        self._sum_over_ranks(squares)
        for p in params:
            kernels.update_weights(p, self.state[p], self._layouts[p], squares, group)

    def _clipping_factors(self, group: dict[str, Any], params: Sequence[Tensor]) -> Tensor:
        """Return [parameters] float32: 1 / max(1, rms), from the updated moments."""
        normalised = [self._normalised_gradient(group, p) for p in params]
        squares = self._square_sums((normalised,), params)[0]
        mean = squares / self._parameter_sizes(squares.device).clamp(min=1)
        return mean.sqrt().clamp(min=1).reciprocal().float()

    def _normalised_gradient(self, group: dict[str, Any], p: Tensor) -> Tensor:
        """Return g / max(sqrt(v), eps) as a new tensor shaped like `p`."""
        expected = self.state[p]["exp_avg_sq"] / (1 - group["betas"][1] ** next_update_number(group))
        assert p.grad is not None  # `tensors_to_update` keeps only tensors with a gradient
        return torch.div(p.grad, expected.sqrt_().clamp_(min=group["eps"]), out=expected)


def _uses_fused_kernels(params: Sequence[Tensor]) -> bool:
    return all(map(_supports, params)) and pick(["fused", "written"], dropped=False, place="update") == "fused"


def _supports(p: Tensor) -> bool:
    """Return whether StableAdamW's kernels support a tensor and its gradient."""
    both = (p, p.grad)
    return has_triton() and all(
        x is not None and x.device.type == "cuda" and x.dtype == torch.float32 and x.is_contiguous() for x in both
    )
