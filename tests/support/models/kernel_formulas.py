"""The formulas of the kernels beside attention (dropout, residual and norm; softmax and cross-entropy over the
vocabulary), written with torch's operations, and random problems for them.

Needs Triton, as `relative_attention.py`. `tests/gpu` has the same problems, in full size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.kernels.residual_norm import NormParameters, residual_norm
from encoder_core.kernels.softmax_loss import overwrite_with_gradient, softmax_sums
from encoder_core.layers.dropout import drop_threshold, kept_scale
from encoder_core.random_draws import uniform_int16

CPU = torch.device("cpu")
_EPS = {True: 1e-12, False: 1e-6}  # of LayerNorm and of RMSNorm
Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class NormProblem:
    """Inputs of dropout, residual and norm. Not `centered`, the norm is RMSNorm."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    draws: Tensor
    rate: float
    centered: bool

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias}
        return {name: x for name, x in named.items() if x is not None}

    def to(self, dtype: torch.dtype) -> "NormProblem":
        made: dict[str, Any] = {n: x.detach().to(dtype).requires_grad_() for n, x in self.leaves.items()}
        return NormProblem(**{"bias": None} | made, draws=self.draws, rate=self.rate, centered=self.centered)

    def by_kernel(self) -> tuple[Tensor, Tensor]:
        threshold = drop_threshold(self.rate)
        norm = NormParameters(self.weight, self.bias, _EPS[self.centered], self.centered)
        return residual_norm(self.x, self.residual, norm, self.draws if threshold else None, threshold)

    def by_formula(self) -> tuple[Tensor, Tensor]:
        threshold, x = drop_threshold(self.rate), self.x
        if threshold:
            zero = torch.zeros((), dtype=torch.int64)
            kept = uniform_int16(self.draws, zero, range(x.shape[1])) >= threshold - 2**15
            x = x * kept * kept_scale(threshold)
        total, width = self.residual + x, x.shape[1:]
        if self.centered:
            return total, F.layer_norm(total, width, self.weight, self.bias, _EPS[True])
        return total, F.rms_norm(total, width, self.weight, _EPS[False])

    def outcome(
        self, way: Callable[["NormProblem"], tuple[Tensor, Tensor]], uses: tuple[bool, bool] = (True, True)
    ) -> Outcome:
        """Return sum, norm and all gradients of a loss. `uses`: whether it depends on the sum, and on its norm."""
        total, normed = way(self)
        weights = torch.linspace(-1, 2, total.numel(), device=total.device).view_as(total).to(total.dtype)
        used = [term for term, use in zip((total.square(), normed * weights), uses, strict=True) if use]
        loss = torch.stack(used).sum()
        gradients = torch.autograd.grad(loss, list(self.leaves.values()), allow_unused=True, materialize_grads=True)
        found = {"sum": total, "normed": normed, **dict(zip(self.leaves, gradients, strict=True))}
        return {name: x.detach() for name, x in found.items()}


def norm_problem(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    rate: float,
    *,
    centered: bool,
    biased: bool = True,
    device: torch.device = CPU,
) -> NormProblem:
    draws = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws).to(dtype).to(device).requires_grad_()

    keys = torch.randint(-(2**62), 2**62, (tokens,), generator=draws).to(device)
    bias = normal(width) if centered and biased else None
    return NormProblem(normal(tokens, width), normal(tokens, width), normal(width), bias, keys, rate, centered)


def losses_by_kernels(logits: Tensor, ids: Tensor) -> Outcome:
    """Return losses, what is correct, and the gradients by logits and by bias."""
    sums, gradient = softmax_sums(logits, ids), logits.clone()
    by_bias = overwrite_with_gradient(gradient, ids, sums, biased=True)
    assert by_bias is not None
    return {"loss": sums.losses, "correct": sums.correct.double(), "gradient": gradient, "by bias": by_bias}


def losses_by_formula(logits: Tensor, ids: Tensor) -> Outcome:
    log_p = logits.log_softmax(-1)
    gradient = log_p.exp()
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1.0
    correct = (logits.argmax(-1) == ids).double()
    losses = -log_p.gather(1, ids[:, None])[:, 0]
    return {"loss": losses, "correct": correct, "gradient": gradient, "by bias": gradient.sum(0)}


def random_logits(
    targets: int, vocabulary: int, dtype: torch.dtype, scale: float, seed: int, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Return random logits and targets, of which every second one has the largest logit."""
    draws = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(targets, vocabulary, generator=draws, dtype=torch.float64)).to(dtype)
    ids = torch.randint(vocabulary, (targets,), generator=draws)
    ids[::2] = logits.argmax(-1)[::2]
    return logits.to(device), ids.to(device)
