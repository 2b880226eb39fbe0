"""Residual, dropout and norm in one kernel, under Triton's interpreter, against the formula that layers write."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels.residual_norm import NormParameters, residual_norm
from encoder_core.layers.dropout import drop_threshold, dropout
from encoder_core.random_draws import draw_key
from tests.support.models.kernel_formulas import NormProblem, norm_problem

TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
}


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
    given = norm_problem(rows, width, dtype, rate, centered=kind != "rms", biased=kind == "layer")
    found, written = (given.outcome(way, uses) for way in (NormProblem.by_kernel, NormProblem.by_formula))
    for one, other in zip(found.values(), written.values(), strict=True):
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
    given = norm_problem(27, 20, torch.float32, 0.3, centered=True)
    ways = (NormProblem.by_kernel, NormProblem.by_kernel, NormProblem.by_formula)
    found, again, written = (given.outcome(way, (False, True)) for way in ways)
    for name, x in found.items():
        assert torch.equal(again[name], x)
        torch.testing.assert_close(x, written[name], rtol=1e-5, atol=1e-5)
