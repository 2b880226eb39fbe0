"""Checks of the kernels beside attention: dropout, residual and norm; softmax and cross-entropy over the vocabulary.

Each kernel is compared with the formula in fp64, repeated, and timed against torch's operations. On a CPU they run
under Triton's interpreter, on few tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.kernels.residual_norm import Norm, residual_norm
from encoder_core.kernels.softmax_loss import softmax_sums, to_gradient
from encoder_core.layers.dropout import inverse_rate, threshold_of
from encoder_core.random_draws import numbers16
from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.machine import device_of, seconds_of
from launcher.plan.burnin.problems import error, mend_interpreter

RATES = (0.0, 0.1, 0.9)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Of the whole tensor, by rounding inputs' products and outcomes once; and of all its numbers together, which rounding
# does not change: a kernel that is 1 % off is found in bf16, too.
_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
_BIAS = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
_WIDTHS = (64, 100, 768, 1024, 4096)
_VOCABULARIES = (1000, 30_528, 50_304, 128_128, 250_112)
_REPEATS, _CPU_REPEATS = 5, 2

Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class _Sums:
    """Inputs of dropout, residual and norm."""

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

    def to(self, dtype: torch.dtype) -> "_Sums":
        made: dict[str, Any] = {n: x.detach().to(dtype).requires_grad_() for n, x in self.leaves.items()}
        return _Sums(**{"bias": None} | made, draws=self.draws, rate=self.rate)

    def by_kernel(self) -> tuple[Tensor, Tensor]:
        threshold = threshold_of(self.rate)
        norm = Norm(self.weight, self.bias, 1e-12, self.bias is not None)
        return residual_norm(self.x, self.residual, norm, self.draws if threshold else None, threshold)

    def by_formula(self) -> tuple[Tensor, Tensor]:
        threshold, x = threshold_of(self.rate), self.x
        if threshold:
            zero = torch.zeros((), dtype=torch.int64)
            kept = numbers16(self.draws, zero, range(x.shape[1])) >= threshold - 2**15
            x = x * kept * inverse_rate(threshold)
        total, width = self.residual + x, x.shape[1:]
        if self.bias is None:
            return total, F.rms_norm(total, width, self.weight, 1e-12)
        return total, F.layer_norm(total, width, self.weight, self.bias, 1e-12)

    def outcome(self, way: Callable[["_Sums"], tuple[Tensor, Tensor]]) -> Outcome:
        """Return sum, norm and all gradients."""
        total, normed = way(self)
        weights = torch.linspace(-1, 2, total.numel(), device=total.device).view_as(total)
        loss = (normed * weights.to(total.dtype)).sum() + total.square().sum()
        gradients = torch.autograd.grad(loss, list(self.leaves.values()))
        found = {"sum": total, "normed": normed, **dict(zip(self.leaves, gradients, strict=True))}
        return {name: x.detach() for name, x in found.items()}


def _sums(
    tokens: int, width: int, dtype: torch.dtype, rate: float, device: torch.device, *, centered: bool
) -> _Sums:
    draws = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws).to(dtype).to(device).requires_grad_()

    keys = torch.randint(-(2**62), 2**62, (tokens,), generator=draws).to(device)
    bias = normal(width) if centered else None
    return _Sums(normal(tokens, width), normal(tokens, width), normal(width), bias, keys, rate)


def norm(bench: Bench) -> None:
    """Check every precision, dropout rate and width, with LayerNorm and RMSNorm."""
    mend_interpreter()
    device, tokens = device_of(bench), 200 if bench.gpu else 3
    for dtype in _dtypes(bench):
        for width in _WIDTHS if bench.gpu else (40,):
            for rate in RATES:
                for centered in (True, False):
                    name = "LayerNorm" if centered else "RMSNorm"
                    what = f"{name}, {_NAMES[dtype]}, {width:,} wide, dropout {rate:g}"
                    with bench.report.attempt(what):
                        given = _sums(tokens, width, dtype, rate, device, centered=centered)
                        again = (given.outcome(_Sums.by_kernel) for _ in range(_repeats(bench)))
                        _hold(bench, what, again, given.to(torch.float64).outcome(_Sums.by_formula), dtype)


def _scored(logits: Tensor, ids: Tensor) -> Outcome:
    """Return losses, hits and gradients as the kernels compute them."""
    sums, gradient = softmax_sums(logits, ids), logits.clone()
    by_bias = to_gradient(gradient, ids, sums, biased=True)
    assert by_bias is not None
    return {"loss": sums.losses, "correct": sums.correct.double(), "gradient": gradient, "by bias": by_bias}


def _scored_by_formula(logits: Tensor, ids: Tensor) -> Outcome:
    log_p = logits.log_softmax(-1)
    gradient = log_p.exp()
    gradient[torch.arange(len(ids), device=ids.device), ids] -= 1.0
    correct = (logits.argmax(-1) == ids).double()
    losses = -log_p.gather(1, ids[:, None])[:, 0]
    return {"loss": losses, "correct": correct, "gradient": gradient, "by bias": gradient.sum(0)}


def _logits(
    targets: int, vocab: int, dtype: torch.dtype, scale: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random logits and targets. Every second target is the first of the two largest logits, which are equal."""
    draws = torch.Generator().manual_seed(vocab)
    logits = (scale * torch.randn(targets, vocab, generator=draws)).to(dtype)
    logits[:, vocab // 2] = logits[:, vocab - 1] = logits.amax(1)
    ids = torch.randint(vocab, (targets,), generator=draws)
    ids[::2] = logits.argmax(-1)[::2]
    return logits.to(device), ids.to(device)


def loss(bench: Bench) -> None:
    """Check every precision and size of vocabulary, with small and large logits."""
    mend_interpreter()
    device, targets = device_of(bench), 150 if bench.gpu else 3
    for dtype in _dtypes(bench):
        for vocab in _VOCABULARIES if bench.gpu else (100, 2500):
            for scale in (1.0, 30.0):
                what = f"{_NAMES[dtype]}, {vocab:,} ids, logits x {scale:g}"
                with bench.report.attempt(what):
                    logits, ids = _logits(targets, vocab, dtype, scale, device)
                    again = (_scored(logits, ids) for _ in range(_repeats(bench)))
                    _hold(bench, what, again, _scored_by_formula(logits.double(), ids), dtype)


def timed(bench: Bench) -> None:
    """Time both kernels beside torch's operations."""
    mend_interpreter()
    device, dtype = device_of(bench), torch.bfloat16 if bench.gpu else torch.float32
    tokens, width = (32_768, 1024) if bench.gpu else (2, 40)
    what = f"norm, {_NAMES[dtype]}, {tokens:,} tokens, {width:,} wide, forward and backward"
    with bench.report.attempt(what):
        given = _sums(tokens, width, dtype, 0.1, device, centered=True)
        _time(bench, f"{what}: one kernel", lambda: given.outcome(_Sums.by_kernel))
        _time(bench, f"{what}: torch", lambda: given.outcome(_Sums.by_formula))
    targets, vocab = (2048, 50_304) if bench.gpu else (2, 2500)
    what = f"loss, {_NAMES[dtype]}, {targets:,} targets, {vocab:,} ids, with gradient"
    with bench.report.attempt(what):
        logits, ids = _logits(targets, vocab, dtype, 1.0, device)
        _time(bench, f"{what}: two kernels and a copy", lambda: _scored(logits, ids))
        _time(bench, f"{what}: torch in fp32", lambda: _scored_by_formula(logits.float(), ids))


def _dtypes(bench: Bench) -> tuple[torch.dtype, ...]:
    """Return the dtypes to check; the interpreter does not round to bf16."""
    return tuple(_NAMES) if bench.gpu else (torch.float32, torch.float16)


def _repeats(bench: Bench) -> int:
    return _REPEATS if bench.gpu else _CPU_REPEATS


def _hold(bench: Bench, what: str, again: Iterator[Outcome], exact: Outcome, dtype: torch.dtype) -> None:
    first = next(again)
    off, biased = error(first, exact)
    bench.report.at_most(f"{what}: error", off, _ERROR[dtype])
    bench.report.at_most(f"{what}: all of it off by", biased, _BIAS[dtype])
    equal = all(torch.equal(other[name], x) for other in again for name, x in first.items())
    bench.report.holds(f"{what}: {_repeats(bench)} times equal bits", equal)


def _time(bench: Bench, what: str, step: Callable[[], object]) -> None:
    bench.report.figure(what, 1e3 * seconds_of(step, device_of(bench)), "ms")
