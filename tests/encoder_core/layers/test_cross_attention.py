"""Attention from one set of rows to another: every kernel against the formula, row by row, with dropout by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.layers.attention import attend_with_best_kernel
from encoder_core.layers.kernel_choice import Kernel, force_kernel, record_requests
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import reference

KERNELS: tuple[Kernel, ...] = ("blocked", "padded", "written")
lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def operands(rows: Rows, others: Rows) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)

    def drawn(of: Rows) -> Tensor:
        shape = len(of.positions), 3, 5
        return torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_(True)

    return drawn(rows), drawn(others), drawn(others)


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25, deadline=None)
@given(lengths=lengths, dropout=st.sampled_from([0.0, 0.3]))
def test_every_kernel_computes_the_formula(kernel: Kernel, lengths: list[tuple[int, int]], dropout: float) -> None:
    """Forward and backward, in fp64; dropout is the same by every kernel."""
    rows, others = (rows_of(list(each)) for each in zip(*lengths, strict=True))
    given_ones, expected_ones = operands(rows, others), operands(rows, others)
    torch.manual_seed(7)
    with force_kernel(kernel):
        found = attend_with_best_kernel(*given_ones, rows, dropout, None, others)
    torch.manual_seed(7)
    expected = reference(*expected_ones, rows, dropout, None, others)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    gradient = torch.randn(found.shape, dtype=torch.float64)
    found.backward(gradient)
    expected.backward(gradient)
    for ours, theirs in zip(given_ones, expected_ones, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dropout", "usual"), [(0.0, "padded"), (0.1, "blocked")])
def test_kernels_are_offered_to_the_trial(dropout: float, usual: Kernel) -> None:
    rows, others = rows_of([3, 9]), rows_of([5, 2])
    with record_requests() as seen:
        attend_with_best_kernel(*operands(rows, others), rows, dropout, None, others)
    assert next(iter(seen["attention", dropout > 0])) == usual
    assert set(seen["attention", dropout > 0]) == set(KERNELS)


def test_on_a_gpu_flash_attention_gets_both_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that computes the same on the CPU."""
    rows, others = rows_of([3, 9]), rows_of([5, 2])
    seen: list[object] = []

    def stand_in(*given: object, window: int | None, causal: bool) -> Tensor:
        seen.extend(given[3:])
        assert window is None
        assert not causal
        q, k, v = given[:3]
        assert isinstance(q, Tensor)
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        return reference(q, k, v, rows, 0.0, None, others)

    module = "encoder_core.layers.attention"
    monkeypatch.setattr(f"{module}._possible_kernels", lambda *given: ["flash", "padded", "written"])
    monkeypatch.setattr(f"{module}.flash_attention", stand_in)
    found = operands(rows, others)
    torch.testing.assert_close(
        attend_with_best_kernel(*found, rows, 0.0, None, others),
        reference(*found, rows, 0.0, None, others),
        rtol=1e-10,
        atol=1e-12,
    )
    assert seen == [rows.cu_seqlens, others.cu_seqlens, 9, 5, 0.0]
