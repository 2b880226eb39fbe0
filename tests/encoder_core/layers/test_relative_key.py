"""Relative positions in the scores against a literal statement, query by query and key by key."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from encoder_core.families.bert import BertConfig
from encoder_core.layers.relative_key import RelativeKeyAttention
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of

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
    torch.testing.assert_close(
        attention(q, k, v, rows, 0.0), literal(q, k, v, rows, attention), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("position", ["relative_key", "relative_key_query"])
def test_bert_with_relative_positions(position: Literal["relative_key", "relative_key_query"]) -> None:
    config = BertConfig(
        layers=2, hidden=16, heads=2, feed_forward=32, max_length=12, vocab=50, position=position
    )
    encoder = config.encoder()
    names = {name for name, _ in encoder.named_parameters()}
    assert "embeddings.position.weight" not in names
    assert "layers.1.attention.attend.distance.weight" in names
    assert encoder.get_parameter("layers.0.attention.attend.distance.weight").shape == (23, 8)


def test_no_tokens_keep_the_graph_whole() -> None:
    attention = RelativeKeyAttention(4, 8, both_sides=True)
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 0)
    inputs = [torch.zeros(0, 3, 8, requires_grad=True) for _ in range(3)]
    context = attention(*inputs, rows, 0.1)
    gradients = torch.autograd.grad(context.sum(), [*inputs, attention.distance.weight])
    assert all(not gradient.any() for gradient in gradients)
