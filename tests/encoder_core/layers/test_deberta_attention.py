"""The kernels of disentangled attention against the formula: values, gradients, and what dropout does."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.layers import cpu_attention, cpu_relative
from encoder_core.layers.deberta_attention import (
    DisentangledKernel,
    Operands,
    Relations,
    RelativePositions,
    attend_blocked,
    attend_padded_rows,
)
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import disentangled_reference

HEADS, WIDTH = 3, 4


def related(rows: Rows, buckets: int | None) -> Relations:
    positions = RelativePositions(12, HEADS * WIDTH, buckets=buckets, eps=1e-7)
    return positions.relate(rows.positions, rows, rows)


def random_inputs(rows: Rows, relations: Relations, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    places = len(relations.table)
    return [
        torch.randn(count, HEADS, WIDTH, generator=draws, dtype=torch.float64).to(dtype).requires_grad_()
        for count in (*[rows.positions.numel()] * 3, places, places)
    ]


def outcome(
    attend: DisentangledKernel,
    rows: Rows,
    relations: Relations,
    inputs: list[Tensor],
    *,
    between_positions: bool = False,
) -> list[Tensor]:
    """The context, and gradients of a weighted sum of it."""
    operands = Operands(*inputs)
    if between_positions:
        operands = operands.with_position_scores()
    context = attend(operands, relations, rows, rows, 0.0)
    weights = torch.linspace(-1, 2, context.numel(), dtype=context.dtype).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), inputs)]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5) | st.just([7, 7, 7]),
    buckets=st.sampled_from([None, 4, 256]),
    attend=st.sampled_from([attend_padded_rows, attend_blocked]),
    between_positions=st.booleans(),
    causal=st.booleans(),
    piece=st.sampled_from([1, 200, 2**18]),
    block=st.sampled_from([1, 3, 8, 64]),
)
def test_equals_the_formula_however_it_is_cut(
    lengths: list[int],
    buckets: int | None,
    attend: DisentangledKernel,
    between_positions: bool,
    causal: bool,
    piece: int,
    block: int,
) -> None:
    rows = replace(rows_of(lengths), causal=causal)
    relations = related(rows, buckets)
    inputs = random_inputs(rows, relations)
    expected = outcome(disentangled_reference, rows, relations, inputs, between_positions=between_positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "PIECE_SCORES", piece)
        patch.setattr(cpu_relative, "BLOCK_TOKENS", block)
        actual = outcome(attend, rows, relations, inputs, between_positions=between_positions)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_scores_between_positions_are_a_term() -> None:
    rows = rows_of([5, 9])
    relations = related(rows, None)
    inputs = random_inputs(rows, relations)
    with_them, without = (
        outcome(disentangled_reference, rows, relations, inputs, between_positions=flag) for flag in (True, False)
    )
    assert not torch.equal(with_them[0], without[0])


def test_gradients_are_those_of_the_drawn_mask() -> None:
    rows = rows_of([4, 3])
    relations = related(rows, 4)

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_blocked(Operands(*inputs), relations, rows, rows, 0.4)

    assert torch.autograd.gradcheck(attend, random_inputs(rows, relations), fast_mode=True)


def test_bf16_is_near_the_formula() -> None:
    rows = rows_of([5, 9, 1, 9, 2])
    relations = related(rows, 4)
    inputs = random_inputs(rows, relations, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = outcome(disentangled_reference, rows, relations, exact)
    for actual, wanted in zip(outcome(attend_blocked, rows, relations, inputs), expected, strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual.double() - wanted).abs().max() / wanted.abs().max() < 0.03
