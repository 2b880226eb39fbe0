"""Residual, dropout and norm in one kernel, under Triton's interpreter, against the formula that layers write."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels.residual_norm import NormParameters, residual_norm
from encoder_core.layers.dropout import drop_threshold, dropout
from encoder_core.random_draws import draw_key

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
}


def norm_of(kind: str, width: int, dtype: torch.dtype) -> nn.LayerNorm | nn.RMSNorm:
    norm = nn.RMSNorm(width, eps=1e-6) if kind == "rms" else nn.LayerNorm(width, eps=1e-12, bias=kind == "layer")
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return norm.to(dtype)


def both_ways(
    kind: str, rows: int, width: int, rate: float, dtype: torch.dtype, uses: tuple[bool, bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outcomes and gradients by the kernel, and by the formula. `uses`: whether the sum, whether its norm is used."""
    x, residual = (torch.randn(rows, width, dtype=dtype, requires_grad=True) for _ in range(2))
    keys, draw, norm = torch.randint(-(2**63), 2**63 - 1, (rows,)), draw_key(), norm_of(kind, width, dtype)
    parameters = list(norm.parameters())
    weights = [torch.randn(rows, width, dtype=dtype) for _ in range(2)]

    def results(total: Tensor, normed: Tensor) -> list[Tensor]:
        terms = ((y * w).sum() for y, w, u in zip((total, normed), weights, uses, strict=True) if u)
        loss = sum(terms, start=torch.zeros((), dtype=total.dtype))
        gradients = torch.autograd.grad(loss, [x, residual, *parameters], materialize_grads=True)
        return [total, normed, *gradients]

    total = residual + dropout(x, rate, keys, draw)
    written = results(total, norm(total))
    threshold = drop_threshold(rate)
    asked = NormParameters(norm.weight, getattr(norm, "bias", None), norm.eps or 0.0, isinstance(norm, nn.LayerNorm))
    found = residual_norm(x, residual, asked, keys + draw if threshold else None, threshold)
    return results(*found), written


@pytest.mark.long
@settings(max_examples=8)
@given(
    st.sampled_from(["layer", "layer without bias", "rms"]),
    st.integers(0, 9),
    st.integers(4, 130),  # the variance of two numbers may be next to nothing, and its inverse multiplies rounding
    st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    st.sampled_from(list(TOLERANCES)),
    st.sampled_from([(True, True), (False, True), (True, False)]),
)
def test_equals_the_formula(
    kind: str, rows: int, width: int, rate: float, dtype: torch.dtype, uses: tuple[bool, bool]
) -> None:
    torch.manual_seed(rows * 1000 + width)
    found, written = both_ways(kind, rows, width, rate, dtype, uses)
    for one, other in zip(found, written, strict=True):
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one / scale, other / scale, **TOLERANCES[dtype])


@pytest.mark.parametrize(("rows", "width", "rate"), [(5, 768, 0.1), (2, 1024, 0.25), (3, 41, 0.9)])
def test_drops_what_the_written_formula_drops(rows: int, width: int, rate: float) -> None:
    ones, keys, draw = torch.ones(rows, width), torch.randint(-(2**63), 2**63 - 1, (rows,)), draw_key()
    norm = NormParameters(torch.ones(width), None, 1e-6, False)
    total, _ = residual_norm(ones, torch.zeros_like(ones), norm, keys + draw, drop_threshold(rate))
    written = dropout(ones, rate, keys, draw)
    assert torch.equal(total, written)
    assert 0 < (total == 0).sum() < total.numel()


@pytest.mark.long
def test_gradients_of_more_tokens_than_programs_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("encoder_core.kernels.residual_norm._MAX_PROGRAMS", 4)
    outcomes = []
    for _ in range(2):
        torch.manual_seed(5)
        found, written = both_ways("layer", 27, 20, 0.3, torch.float32, (False, True))
        outcomes.append(found)
        for one, other in zip(found, written, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
