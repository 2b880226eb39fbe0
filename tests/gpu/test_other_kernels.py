"""The kernels beside attention (dropout, residual and norm; softmax and cross-entropy over the vocabulary): compared
with their formulas in fp64, repeated, and timed beside torch's operations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.kernels.residual_norm import NormParameters, residual_norm
from encoder_core.kernels.softmax_loss import overwrite_with_gradient, softmax_sums
from encoder_core.layers.dropout import drop_threshold, kept_scale
from encoder_core.random_draws import uniform_int16
from tests.gpu.machine import DEVICE, DTYPES, GPU, MAX_BIAS, MAX_ERROR, Figure, seconds_of
from tests.gpu.problems import error

_WIDTHS = (64, 100, 768, 1024, 4096) if GPU else (40,)
_VOCABULARIES = (1000, 30_528, 50_304, 128_128, 250_112) if GPU else (100, 2500)
_REPEATS = 5 if GPU else 2

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class NormProblem:
    """Inputs of dropout, residual and norm. Without a bias the norm is RMSNorm."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    draws: Tensor
    rate: float

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias}
        return {name: x for name, x in named.items() if x is not None}

    def to(self, dtype: torch.dtype) -> "NormProblem":
        made: dict[str, Any] = {n: x.detach().to(dtype).requires_grad_() for n, x in self.leaves.items()}
        return NormProblem(**{"bias": None} | made, draws=self.draws, rate=self.rate)

    def by_kernel(self) -> tuple[Tensor, Tensor]:
        threshold = drop_threshold(self.rate)
        norm = NormParameters(self.weight, self.bias, 1e-12, self.bias is not None)
        return residual_norm(self.x, self.residual, norm, self.draws if threshold else None, threshold)

    def by_formula(self) -> tuple[Tensor, Tensor]:
        threshold, x = drop_threshold(self.rate), self.x
        if threshold:
            zero = torch.zeros((), dtype=torch.int64)
            kept = uniform_int16(self.draws, zero, range(x.shape[1])) >= threshold - 2**15
            x = x * kept * kept_scale(threshold)
        total, width = self.residual + x, x.shape[1:]
        if self.bias is None:
            return total, F.rms_norm(total, width, self.weight, 1e-12)
        return total, F.layer_norm(total, width, self.weight, self.bias, 1e-12)

    def outcome(self, way: Callable[["NormProblem"], tuple[Tensor, Tensor]]) -> Outcome:
        """Return sum, norm and all gradients."""
        total, normed = way(self)
        weights = torch.linspace(-1, 2, total.numel(), device=total.device).view_as(total)
        loss = (normed * weights.to(total.dtype)).sum() + total.square().sum()
        gradients = torch.autograd.grad(loss, list(self.leaves.values()))
        found = {"sum": total, "normed": normed, **dict(zip(self.leaves, gradients, strict=True))}
        return {name: x.detach() for name, x in found.items()}


def _norm_problem(tokens: int, width: int, dtype: torch.dtype, rate: float, *, centered: bool) -> NormProblem:
    draws = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws).to(dtype).to(DEVICE).requires_grad_()

    keys = torch.randint(-(2**62), 2**62, (tokens,), generator=draws).to(DEVICE)
    bias = normal(width) if centered else None
    return NormProblem(normal(tokens, width), normal(tokens, width), normal(width), bias, keys, rate)


def _compare(compute: Callable[[], Outcome], exact: Outcome, dtype: torch.dtype) -> None:
    first = compute()
    off, biased = error(first, exact)
    assert off <= MAX_ERROR[dtype]
    assert biased <= MAX_BIAS[dtype]
    for _ in range(_REPEATS - 1):
        again = compute()
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_their_formula_and_repeat(dtype: str, width: int, rate: float, centered: bool) -> None:
    given = _norm_problem(200 if GPU else 3, width, DTYPES[dtype], rate, centered=centered)
    exact = given.to(torch.float64).outcome(NormProblem.by_formula)
    _compare(lambda: given.outcome(NormProblem.by_kernel), exact, DTYPES[dtype])


def _scored(logits: Tensor, ids: Tensor) -> Outcome:
    """Return losses, hits and gradients as the kernels compute them."""
    sums, gradient = softmax_sums(logits, ids), logits.clone()
    by_bias = overwrite_with_gradient(gradient, ids, sums, biased=True)
    assert by_bias is not None
    return {"loss": sums.losses, "correct": sums.correct.double(), "gradient": gradient, "by bias": by_bias}


def _scored_by_formula(logits: Tensor, ids: Tensor) -> Outcome:
    log_p = logits.log_softmax(-1)
    gradient = log_p.exp()
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1.0
    correct = (logits.argmax(-1) == ids).double()
    losses = -log_p.gather(1, ids[:, None])[:, 0]
    return {"loss": losses, "correct": correct, "gradient": gradient, "by bias": gradient.sum(0)}


def _logits(targets: int, vocabulary: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Return random logits and targets. Every second target is the first of the two largest logits, which are equal."""
    draws = torch.Generator().manual_seed(vocabulary)
    logits = (scale * torch.randn(targets, vocabulary, generator=draws)).to(dtype)
    logits[:, vocabulary // 2] = logits[:, vocabulary - 1] = logits.amax(1)
    ids = torch.randint(vocabulary, (targets,), generator=draws)
    ids[::2] = logits.argmax(-1)[::2]
    return logits.to(DEVICE), ids.to(DEVICE)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("vocabulary", _VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_equal_their_formula_and_repeat(dtype: str, vocabulary: int, scale: float) -> None:
    logits, ids = _logits(150 if GPU else 3, vocabulary, DTYPES[dtype], scale)
    _compare(lambda: _scored(logits, ids), _scored_by_formula(logits.double(), ids), DTYPES[dtype])


def test_times_beside_torch(figure: Figure) -> None:
    dtype = torch.bfloat16 if GPU else torch.float32
    tokens, width = (32_768, 1024) if GPU else (2, 40)
    given = _norm_problem(tokens, width, dtype, 0.1, centered=True)
    logits, ids = _logits(*((2048, 50_304) if GPU else (2, 2500)), dtype, 1.0)
    for what, step in {
        "norm: one kernel": lambda: given.outcome(NormProblem.by_kernel),
        "norm: torch": lambda: given.outcome(NormProblem.by_formula),
        "loss: two kernels and a copy": lambda: _scored(logits, ids),
        "loss: torch in fp32": lambda: _scored_by_formula(logits.float(), ids),
    }.items():
        figure(what, 1e3 * seconds_of(step), "ms")
