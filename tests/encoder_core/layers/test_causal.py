"""Causal rows: no token sees a later one, by any kernel and in any family whose layers allow it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_batch import make_batch
from torch import Tensor

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import build_encoder
from encoder_core.layers import attention as kernels
from encoder_core.layers import cpu_attention, deberta_attention
from encoder_core.layers.attention import Attend, automatic, blocked, padded_sdpa, written_formula
from encoder_core.layers.cpu_attention import local_pieces
from encoder_core.layers.initialise import initialise
from encoder_core.layers.relative_key import RelativeKeyAttention
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import disentangled_reference, reference
from tests.support.models.small_networks import NETWORKS

KERNELS: tuple[Attend, ...] = (automatic, padded_sdpa, blocked, written_formula)
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=4)
WINDOWS = st.none() | st.integers(1, 210)


def causal(lengths: list[int]) -> Rows:
    return replace(rows_of(lengths), causal=True)


def heads(rows: Rows, seed: int, *, shared: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of two heads, and keys and values of `shared`."""
    draws = torch.Generator().manual_seed(seed)
    tokens = rows.positions.numel()
    q, k, v = (
        torch.randn(tokens, count, 4, generator=draws, dtype=torch.float64, requires_grad=True)
        for count in (2, shared, shared)
    )
    return q, k, v


def outcome(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], *given: object) -> list[Tensor]:
    """The context, and gradients of a weighted sum of it."""
    context = attend(*inputs, *given)
    weights = torch.linspace(-1, 2, context.numel(), dtype=context.dtype).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), inputs)]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, WINDOWS, st.sampled_from(KERNELS), st.integers(1, 2))
def test_every_kernel_equals_the_formula(
    lengths: list[int], window: int | None, attend: Attend, shared: int
) -> None:
    rows = causal(lengths)
    inputs = heads(rows, 1, shared=shared)
    expected = outcome(reference, inputs, rows, 0.0, window)
    assert_close(outcome(attend, inputs, rows, 0.0, window), expected)


@given(st.integers(1, 100), WINDOWS)
def test_the_formula_shows_a_token_what_is_before_it(length: int, window: int | None) -> None:
    """With equal keys a query's context is the mean of the values in sight, here of their places."""
    zeros = torch.zeros(length, 1, 1, dtype=torch.float64)
    places = torch.arange(length, dtype=torch.float64)[:, None, None]
    context = reference(zeros, zeros, places, causal([length]), 0.0, window)
    first = torch.zeros_like(places) if window is None else (places - window).clamp(min=0)
    torch.testing.assert_close(context, (first + places) / 2)


@settings(max_examples=20, deadline=None)
@given(LENGTHS, WINDOWS, st.sampled_from(KERNELS), st.sampled_from([0.0, 0.3]), st.data())
def test_no_later_token_changes_an_earlier_context(
    lengths: list[int], window: int | None, attend: Attend, dropout: float, data: st.DataObject
) -> None:
    rows = causal(lengths)
    q, k, v = heads(rows, 2)
    place = data.draw(st.integers(0, len(q) - 1))
    stop = next(stop for start, stop in rows.bounds if start <= place < stop)

    def context(k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(q, k, v, rows, dropout, window).detach()

    before = context(k, v)
    other_k, other_v = k.detach().clone(), v.detach().clone()
    other_k[place:stop] += 1.0
    other_v[place:stop] -= 2.0
    after = context(other_k, other_v)
    same = torch.ones(len(q), dtype=torch.bool)
    same[place:stop] = False
    torch.testing.assert_close(after[same], before[same], rtol=1e-12, atol=1e-12)
    if not dropout:
        assert not torch.allclose(after[place], before[place])


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("length", [512, 4096])
def test_a_cpu_makes_no_block_of_scores_above_the_diagonal(length: int, window: int | None) -> None:
    pieces = list(local_pieces(((0, length),), 12, window, causal=True))
    for _, queries, keys, _ in pieces:
        assert keys.stop <= queries.stop
    made = sum((q.stop - q.start) * (k.stop - k.start) * (n.stop - n.start) for _, q, k, n in pieces)
    least = length * (length + 1) // 2 if window is None else length * window
    assert made <= 12 * (least + 2 * length * cpu_attention.BLOCK_QUERIES)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 2])
def test_blocked_gradients_are_those_of_its_own_dropout_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "BLOCK_QUERIES", 3)
    rows = causal([4, 1])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return blocked(q, k, v, rows, 0.4, window)

    assert torch.autograd.gradcheck(attend, heads(rows, 1))


@pytest.mark.parametrize("window", [None, 3])
def test_relative_keys_see_nothing_later(window: int | None) -> None:
    """Without distances it is plain attention; with them, later tokens change nothing either."""
    rows = causal([5, 9, 1, 9, 2])
    inputs = heads(rows, 1)
    attend = RelativeKeyAttention(9, 4, both_sides=True).double()
    torch.nn.init.zeros_(attend.distance.weight)
    assert_close(outcome(attend, inputs, rows, 0.0, window), outcome(reference, inputs, rows, 0.0, window))


@pytest.mark.parametrize("attend", [deberta_attention.padded, deberta_attention.blocked])
@pytest.mark.parametrize("buckets", [None, 4])
def test_disentangled_kernels_equal_the_formula(
    buckets: int | None, attend: deberta_attention.AttendDisentangled
) -> None:
    rows = causal([5, 9, 1, 9, 2])
    positions = deberta_attention.RelativePositions(12, 8, buckets=buckets, eps=1e-7)
    relations = positions.relate(rows.positions, rows, rows)
    draws = torch.Generator().manual_seed(1)
    places = len(relations.table)
    inputs = tuple(
        torch.randn(count, 2, 4, generator=draws, dtype=torch.float64, requires_grad=True)
        for count in (26, 26, 26, places, places)
    )

    def by(kernel: deberta_attention.AttendDisentangled) -> list[Tensor]:
        def context(*given: Tensor) -> Tensor:
            return kernel(deberta_attention.Operands(*given), relations, rows, rows, 0.0)

        return outcome(context, inputs)

    assert_close(by(attend), by(disentangled_reference))


@pytest.mark.parametrize(("window", "right"), [(None, None), (3, 0)])
def test_flash_attention_is_told(
    window: int | None, right: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operator's own switch; a window ends at the query."""
    told: list[object] = []

    class Operators:
        class aten:
            @staticmethod
            def _flash_attention_forward(*given: object, **windows: object) -> tuple[object]:
                told.extend([given[8], windows["window_size_left"], windows["window_size_right"]])
                return (given[0],)

    monkeypatch.setattr(torch, "ops", Operators)
    rows = causal([4, 2])
    kernels.varlen_flash(*heads(rows, 1), rows, 0.0, window)
    assert told == [True, window, right]


@pytest.mark.parametrize("window", [None, 64])
def test_flash_attention_carries_a_derivative(window: int | None) -> None:
    rows = Rows(
        torch.empty(4, dtype=torch.int32, device="meta"),
        torch.empty(20, dtype=torch.int64, device="meta"),
        9,
        causal=True,
    )
    q, k, v = (
        torch.empty(20, 3, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)
    )
    context = kernels.varlen_flash(q, k, v, rows, 0.1, window)
    assert [grad.shape for grad in torch.autograd.grad(context.sum(), (q, k, v))] == [(20, 3, 8)] * 3


NAMES = [
    "roberta",
    "bert with relative keys",
    "albert",
    "electra",
    "deberta without mask decoder",
    "modernbert",
    "eurobert",
    "xlm",
]
BY_NAME = {network.name: network.model for network in NETWORKS}


@pytest.mark.parametrize("name", NAMES)
def test_no_later_token_changes_an_earlier_state(name: str) -> None:
    """In a row and beside it: what is changed from some place on changes no state before it, and no other row."""
    config = BY_NAME[name]
    encoder = build_encoder(config)
    torch.manual_seed(1)
    initialise(encoder, 0.3, config.initializer)
    encoder = encoder.double().eval()
    batch = replace(make_batch([23, 40, 7], 500), causal=True)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        states = encoder(batch)
        for place in torch.randint(1, 40, (6,), generator=draws).tolist():
            tokens = batch.tokens.clone()
            tokens[23 + place : 63] = torch.randint(500, (40 - place,), generator=draws)
            changed = encoder(replace(batch, tokens=tokens))
            torch.testing.assert_close(changed[: 23 + place], states[: 23 + place], rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(changed[63:], states[63:], rtol=1e-11, atol=1e-11)
            assert not torch.allclose(changed[62], states[62])
        assert not torch.allclose(encoder(replace(batch, causal=False)), states)


@pytest.mark.parametrize("name", ["deberta v2", "xlnet"])
def test_layers_that_look_ahead_refuse_causal_rows(name: str) -> None:
    encoder = build_encoder(BY_NAME[name])
    with pytest.raises(ModelError):
        encoder(replace(make_batch([9, 7], 500), causal=True))
