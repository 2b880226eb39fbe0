"""Every attention kernel against the formula, on rows that see both sides and on causal ones: values, gradients, and
what dropout does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_batch import make_batch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from encoder_core.layers import attention as kernels
from encoder_core.layers import cpu_attention
from encoder_core.layers.attention import (
    AttentionKernel,
    attend_blocked,
    attend_with_best_kernel,
    padded_sdpa,
    written_formula,
)
from encoder_core.layers.cpu_attention import local_pieces
from encoder_core.layers.gpu_attention import flash_supports, fused_supports
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import reference
from tests.support.models.small_networks import NETWORKS, build

KERNELS: tuple[AttentionKernel, ...] = (attend_with_best_kernel, padded_sdpa, attend_blocked, written_formula)
RAGGED = st.lists(st.integers(1, 150), min_size=1, max_size=3)
FULL = st.tuples(st.integers(1, 60), st.integers(1, 4)).map(lambda drawn: [drawn[0]] * drawn[1])
WINDOWS = st.none() | st.integers(1, 210)
MIXED = [5, 9, 1, 9, 2]

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


def rows_like(lengths: list[int], causal: bool) -> Rows:
    return replace(rows_of(lengths), causal=causal)


def random_heads(rows: Rows, dtype: torch.dtype = torch.float64, *, shared: int = 2) -> Inputs:
    """Queries of two heads, and keys and values of `shared`."""
    draws, tokens = torch.Generator().manual_seed(1), rows.positions.numel()
    q, k, v = (
        torch.randn(tokens, heads, 8, generator=draws, dtype=dtype, requires_grad=True) for heads in (2, shared, shared)
    )
    return q, k, v


def each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    q, k, v = inputs
    return change(q), change(k), change(v)


def outcome(attend: AttentionKernel, rows: Rows, inputs: Inputs, window: int | None = None) -> list[Tensor]:
    """The context without dropout, and gradients of a weighted sum of it."""
    context = attend(*inputs, rows, 0.0, window)
    weights = torch.linspace(-1, 2, context.numel(), dtype=context.dtype).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), inputs)]


def assert_same(attend: AttentionKernel, rows: Rows, inputs: Inputs, window: int | None = None) -> None:
    found, expected = (outcome(kernel, rows, inputs, window) for kernel in (attend, reference))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)


@given(
    lengths=RAGGED | FULL,
    window=WINDOWS,
    attend=st.sampled_from(KERNELS),
    causal=st.booleans(),
    shared=st.integers(1, 2),
    piece=st.sampled_from([100, 2**18]),
)
def test_every_kernel_equals_the_formula(
    lengths: list[int], window: int | None, attend: AttentionKernel, causal: bool, shared: int, piece: int
) -> None:
    """Rows shorter and longer than the window and than a block of queries, together, however they are cut."""
    rows = rows_like(lengths, causal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "PIECE_SCORES", piece)
        assert_same(attend, rows, random_heads(rows, shared=shared), window)


@pytest.mark.parametrize(("window", "causal"), [(64, False), (64, True), (None, True)])
@pytest.mark.parametrize("length", [512, 4096])
def test_a_cpu_makes_only_the_scores_near_the_diagonal_and_none_above_it(
    length: int, window: int | None, causal: bool
) -> None:
    pieces = list(local_pieces(((0, length),), 12, window, causal=causal))
    scores = [
        (queries.stop - queries.start) * (keys.stop - keys.start) * (heads.stop - heads.start)
        for _, queries, keys, heads in pieces
    ]
    assert max(scores) <= cpu_attention.PIECE_SCORES
    if not causal:
        assert sum(scores) <= 12 * length * 3 * 64
        return
    assert all(keys.stop <= queries.stop for _, queries, keys, _ in pieces)
    least = length * (length + 1) // 2 if window is None else length * window
    assert sum(scores) <= 12 * (least + 2 * length * cpu_attention.BLOCK_QUERIES)


@pytest.mark.heavy
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_blocked_gradients_are_those_of_its_own_dropout_mask(
    window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "BLOCK_QUERIES", 3)
    rows = rows_like([5, 1, 4], causal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend_blocked(q, k, v, rows, 0.4, window)

    assert torch.autograd.gradcheck(attend, random_heads(rows), fast_mode=True)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), WINDOWS, st.sampled_from(KERNELS), st.data())
def test_no_later_token_changes_an_earlier_context_with_dropout(
    lengths: list[int], window: int | None, attend: AttentionKernel, data: st.DataObject
) -> None:
    rows = rows_like(lengths, True)
    q, k, v = random_heads(rows)
    place = data.draw(st.integers(0, len(q) - 1))
    stop = next(stop for start, stop in rows.bounds if start <= place < stop)
    found = []
    for added in (0.0, 1.0):
        moved = torch.zeros(len(q), 1, 1, dtype=torch.float64)
        moved[place:stop] = added
        torch.manual_seed(3)
        found.append(attend(q, k + moved, v - 2 * moved, rows, 0.3, window).detach())
    same = torch.ones(len(q), dtype=torch.bool)
    same[place:stop] = False
    torch.testing.assert_close(found[1][same], found[0][same], rtol=1e-12, atol=1e-12)


def test_blocked_drops_probabilities_at_the_asked_rate_and_keeps_the_mean() -> None:
    """With equal keys all probabilities are 1/L, so a value of ones gives kept / (L (1 - rate))."""
    length, rate = 64, 0.1
    rows = rows_of([length] * 40)
    q = torch.zeros(40 * length, 2, 4)
    v = torch.ones_like(q)
    torch.manual_seed(0)
    kept = attend_blocked(q, q, v, rows, rate)[..., 0] * (1 - rate)
    draws = 40 * length * length * 2
    assert abs(kept.mean().item() - (1 - rate)) < 4 * (rate * (1 - rate) / draws) ** 0.5
    counts = kept * length
    assert torch.allclose(counts, counts.round(), atol=1e-2)
    assert counts.var().item() == pytest.approx(length * rate * (1 - rate), rel=0.1)


@pytest.mark.parametrize("attend", [padded_sdpa, attend_blocked])
def test_bf16_is_near_the_formula(attend: AttentionKernel) -> None:
    rows = rows_of(MIXED)
    inputs = random_heads(rows, torch.bfloat16)
    exact = each(lambda x: x.detach().double().requires_grad_(), inputs)
    for actual, expected in zip(outcome(attend, rows, inputs), outcome(reference, rows, exact), strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 0.03


def stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *rest: object,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """torch's flash operator, for a processor: same arguments, same five results, no dropout."""
    lengths = cu_q.diff().tolist()
    assert torch.equal(cu_q, cu_k)
    assert max_q == max_k == max(lengths)
    assert cu_q.dtype == torch.int32
    dropout, is_causal, return_debug_mask = rest
    assert (dropout, return_debug_mask) == (0.0, False)
    q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    mask = torch.arange(max_k) < cu_k.diff()[:, None]
    ahead = torch.arange(max_k) - torch.arange(max_k)[:, None]
    left, right = (max_k if size is None else size for size in (window_size_left, window_size_right))
    near = (-ahead <= left) & (ahead <= (min(0, right) if is_causal else right))
    seen = mask[:, None, None] & (near | ~mask[:, None, :, None])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    empty = torch.empty(0)
    return out.transpose(1, 2)[mask], empty, empty, empty, empty


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [MIXED, [7, 7, 7]], ids=["mixed", "equal"])
def test_varlen_passes_rows_and_windows_to_the_operator(
    lengths: list[int], window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operators:
        class aten:
            _flash_attention_forward = staticmethod(stand_in)

    rows = rows_like(lengths, causal)
    inputs = random_heads(rows)
    expected = outcome(reference, rows, inputs, window)
    monkeypatch.setattr(torch, "ops", Operators)
    for actual, wanted in zip(outcome(kernels.varlen_flash, rows, inputs, window), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 64])
def test_varlen_fits_the_real_operators_signature_and_derivative(window: int | None, causal: bool) -> None:
    """Shapes only, on the meta device: the operator accepts dropout and a window, and carries a derivative."""
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    rows = Rows(bounds, torch.empty(20, dtype=torch.int64, device="meta"), 9, causal=causal)
    q, k, v = torch.empty(3, 20, 3, 8, dtype=torch.bfloat16, device="meta", requires_grad=True).unbind()
    context = kernels.varlen_flash(q, k, v, rows, 0.1, window)
    shapes = [grad.shape for grad in torch.autograd.grad(context.sum(), (q, k, v))]
    assert [context.shape, *shapes] == [(20, 3, 8)] * 4


@pytest.mark.parametrize(
    ("device", "dtype", "width", "flash", "fused"),
    [
        ("cuda", torch.bfloat16, 64, True, True),
        ("cuda", torch.float16, 256, True, False),
        ("cuda", torch.float32, 64, False, True),
        ("cuda", torch.float32, 24, False, True),
        ("cuda", torch.float64, 64, False, False),
        ("cuda", torch.bfloat16, 20, False, True),
        ("cuda", torch.bfloat16, 264, False, False),
        ("cpu", torch.bfloat16, 64, False, False),
        ("cpu", torch.float32, 64, False, False),
    ],
)
def test_kernels_of_gpus_are_chosen_where_they_exist(
    device: str, dtype: torch.dtype, width: int, flash: bool, fused: bool
) -> None:
    assert flash_supports(device, dtype, width) is flash
    assert fused_supports(device, dtype, width) is fused


FLASH_FAMILIES = ("roberta", "spanbert", "albert", "electra", "modernbert", "eurobert", "xlm", "distilbert")


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.parametrize("family", FLASH_FAMILIES)
def test_every_family_attends_by_flash_wherever_nothing_is_dropped(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without numbers that is taken for a GPU, in bf16: in training without dropout, and in evaluation of a
    model with dropout, which trains by our kernels."""
    (network,) = (network for network in NETWORKS if network.name == family)
    used: list[str] = []
    for name in ("flash_supports", "fused_supports"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda device, *kind, real=real: real("cuda", *kind))
    for name in ("varlen_flash", "attend_fused", "padded_sdpa", "attend_blocked", "written_formula"):
        monkeypatch.setattr(kernels, name, lambda q, *given, name=name: used.append(name) or torch.empty_like(q))
    rates = {"dropout": 0.1, "attention_dropout": 0.1}
    batch = make_batch([5, 20, 33, 1], 500).to(torch.device("meta"))
    for dropped in (False, True):
        model = network.model.model_copy(update={name: rate * dropped for name, rate in rates.items()})
        with torch.device("meta"):
            module = build(replace(network, model=model)).bfloat16()
        for training in (True, False):
            used.clear()
            module.train(training)(batch)
            expected = "attend_fused" if dropped and training else "varlen_flash"
            students = network.objective.distil is not None  # its teachers drop nothing
            assert set(used) == {expected, "varlen_flash"} if students else {expected}, (dropped, training)
