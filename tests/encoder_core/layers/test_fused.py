"""The fused attention in the families' layers, under Triton's interpreter: what other kernels compute, dropout too."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from encoder_core.batch import Batch, batch_without_targets
from encoder_core.layers import attention, deberta_attention
from encoder_core.layers.attention import Heads
from encoder_core.layers.deberta_attention import DisentangledKernel, Operands, RelativePositions
from encoder_core.layers.deberta_encoder import rows_of_queries as queries_at
from encoder_core.layers.relative_key import RelativeKeyAttention
from encoder_core.layers.rows import Rows
from encoder_core.layers.xlnet_attention import TwoStreamAttention
from encoder_core.layers.xlnet_scope import AttentionScope
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import disentangled_reference, reference

pytest.importorskip("triton", reason="Triton is not installed")

HEADS, WIDTH, LENGTHS = 2, 6, [7, 1, 18]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def same(one: Callable[[], Tensor], other: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    """Equal values and gradients, from the same state of the generator."""
    outcomes = []
    for compute in (one, other):
        torch.manual_seed(5)
        y = compute()
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for found, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(("dropout", "window"), [(0.3, None), (0.3, 4)])
def test_plain(dropout: float, window: int | None) -> None:
    rows = rows_of(LENGTHS)
    q, k, v = (random(sum(LENGTHS), HEADS, WIDTH) for _ in range(3))
    same(
        lambda: attention.attend_fused(q, k, v, rows, dropout, window),
        lambda: reference(q, k, v, rows, dropout, window),
        [q, k, v],
    )


@pytest.mark.long
@pytest.mark.parametrize("both_sides", [False, True])
def test_relative_keys(both_sides: bool) -> None:
    rows = rows_of(LENGTHS)
    layer = RelativeKeyAttention(20, WIDTH, both_sides=both_sides).double()
    inputs = [random(sum(LENGTHS), HEADS, WIDTH) for _ in range(3)]
    table = layer.distance.weight[20 - max(LENGTHS) : 20 + max(LENGTHS) - 1]

    def by(kernel: Callable[..., Heads]) -> Callable[[], Tensor]:
        return lambda: kernel(*inputs, table, rows, 0.3, None)

    same(by(layer.attend_fused), by(layer.attend_padded_rows), [*inputs, layer.distance.weight])


@pytest.mark.long
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("buckets", [None, 4])
def test_disentangled(buckets: int | None, few: bool) -> None:
    rows = Rows.from_batch(batch := flat(LENGTHS))
    query_rows = queries_at(torch.tensor([0, 3, 7, 12, 25]), batch) if few else rows
    positions = RelativePositions(20, HEADS * WIDTH, buckets=buckets, eps=1e-7).double()
    at = batch.positions if query_rows.at is None else batch.positions[query_rows.at]
    relations = positions.relate(at, rows, query_rows)
    counts = (len(at), *[len(batch.tokens)] * 2, *[len(relations.table)] * 2)
    inputs = [random(count, HEADS, WIDTH) for count in counts]
    operands = Operands(*inputs).with_position_scores()

    def by(attend: DisentangledKernel) -> Callable[[], Tensor]:
        return lambda: attend(operands, relations, query_rows, rows, 0.3)

    same(by(deberta_attention.attend_fused), by(disentangled_reference), inputs)


@pytest.mark.long
@pytest.mark.parametrize("content", [False, True])
def test_two_streams(content: bool) -> None:
    tokens, carried = sum(LENGTHS), 5
    batch = replace(
        flat(LENGTHS),
        order=torch.randint(0, 9, (tokens,)),
        segments=torch.randint(0, 3, (tokens,)),
        reversed_rows=torch.tensor([False, False, True]),
    )
    rows = Rows.from_batch(batch)
    query_rows = rows if content else queries_at(torch.tensor([0, 3, 12, 25]), batch)
    scope = AttentionScope(batch, rows, query_rows, carried)
    layer = TwoStreamAttention(HEADS * WIDTH, HEADS, eps=1e-7, dropout=0.0, attention_dropout=0.3).double()
    relative = [
        layer.content_bias.bias,
        layer.distance_bias.bias,
        layer.segment_bias.bias,
        layer.segment.weight,
    ]
    for parameter in relative:
        nn.init.normal_(parameter)
    longest = max(LENGTHS) + carried
    queries = random(tokens if content else 4, HEADS, WIDTH)
    inputs = [
        queries,
        *(random(len(LENGTHS), HEADS, longest, WIDTH) for _ in range(2)),
        random(HEADS, 2 * longest - 1, WIDTH),
        *relative,
    ]
    query, key, value, distances, *_ = inputs

    def by(attend: Callable[..., Tensor]) -> Callable[[], Tensor]:
        return lambda: attend(query, (key, value), distances, scope)

    same(by(layer.attend_fused), by(layer.attend_padded_rows), inputs)


def flat(lengths: list[int]) -> Batch:
    return batch_without_targets(torch.zeros(sum(lengths), dtype=torch.int64), lengths)
