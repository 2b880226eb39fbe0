"""Relative positions in the scores against a literal statement, query by query and key by key."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from encoder_core.layers.relative_key import RelativeKeyAttention
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import reference

LENGTHS = [5, 9, 1]


def literal(q: Tensor, k: Tensor, v: Tensor, rows: Rows, attention: RelativeKeyAttention) -> Tensor:
    table, centre = attention.distance.weight, attention.max_length - 1
    out = torch.zeros_like(v)
    for start, stop in rows.bounds:
        for head in range(q.shape[1]):
            for i in range(start, stop):
                scores = []
                for j in range(start, stop):
                    distance = table[centre + i - j]
                    score = q[i, head] @ k[j, head] + q[i, head] @ distance
                    if attention.both_sides:
                        score = score + k[j, head] @ distance
                    scores.append(score / q.shape[-1] ** 0.5)
                out[i, head] = torch.stack(scores).softmax(0) @ v[start:stop, head]
    return out


@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6]], ids=["mixed", "equal"])
@pytest.mark.parametrize("both_sides", [False, True])
@pytest.mark.parametrize("max_length", [9, 16])
def test_equals_the_formula(lengths: list[int], both_sides: bool, max_length: int) -> None:
    torch.manual_seed(0)
    attention = RelativeKeyAttention(max_length, 4, both_sides=both_sides).double()
    rows = rows_of(lengths)
    q, k, v = (torch.randn(sum(lengths), 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.testing.assert_close(attention(q, k, v, rows, 0.0), literal(q, k, v, rows, attention), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_without_distances_it_is_plain_attention_within_the_window(window: int | None, causal: bool) -> None:
    rows = replace(rows_of([5, 9, 1, 9, 2]), causal=causal)
    inputs = torch.randn(3, 26, 2, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = inputs.unbind()
    attend = RelativeKeyAttention(9, 4, both_sides=True).double()
    torch.nn.init.zeros_(attend.distance.weight)
    found, expected = (kernel(q, k, v, rows, 0.0, window) for kernel in (attend, reference))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = torch.randn(found.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((context * weights).sum(), inputs)[0] for context in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)
