"""Every attention kernel against the formula: values, gradients, and what dropout does."""

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
from encoder_core.layers import cpu_attention as blocked_module
from encoder_core.layers.attention import Attend, automatic, blocked, padded_sdpa
from encoder_core.layers.cpu_attention import local_pieces
from encoder_core.layers.gpu_attention import flash_takes
from encoder_core.layers.relative_key import RelativeKeyAttention
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of
from tests.support.models.plain_attention import reference
from tests.support.models.small_networks import NETWORKS, build

LENGTHS = {"mixed": [5, 9, 1, 9, 2], "equal": [7, 7, 7], "one_row": [11]}


Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


def three(make: Callable[[], Tensor]) -> Inputs:
    return make(), make(), make()


def each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    q, k, v = inputs
    return change(q), change(k), change(v)


def random_heads(rows: Rows, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    shape = (rows.positions.numel(), 3, 8)
    return three(lambda: torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True))


def outcome(
    attend: Attend, rows: Rows, inputs: Inputs, dropout: float = 0.0, window: int | None = None
) -> list[Tensor]:
    """The context, and gradients of a weighted sum of it."""
    context = attend(*inputs, rows, dropout, window)
    weights = torch.linspace(-1, 2, context.numel(), dtype=context.dtype).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), inputs)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("attend", [automatic, padded_sdpa, blocked])
def test_equals_the_formula(attend: Attend, lengths: list[int]) -> None:
    rows = rows_of(lengths)
    inputs = random_heads(rows)
    for actual, expected in zip(outcome(attend, rows, inputs), outcome(reference, rows, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    window=st.integers(1, 210),
    attend=st.sampled_from([automatic, padded_sdpa, blocked]),
)
def test_windows_equal_the_formula(lengths: list[int], window: int, attend: Attend) -> None:
    """Rows shorter and longer than the window and than a block of queries, together."""
    rows = rows_of(lengths)
    inputs = random_heads(rows)
    expected = outcome(reference, rows, inputs, window=window)
    for actual, wanted in zip(outcome(attend, rows, inputs, window=window), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)


@given(length=st.integers(1, 300), window=st.integers(1, 320))
def test_the_formula_hides_what_is_further_away_than_the_window(length: int, window: int) -> None:
    """With equal keys a query's context is the mean of the values in sight, here of their places."""
    rows = rows_of([length])
    zeros = torch.zeros(length, 1, 1, dtype=torch.float64)
    places = torch.arange(length, dtype=torch.float64)[:, None, None]
    context = reference(zeros, zeros, places, rows, 0.0, window)
    first, last = (places - window).clamp(min=0), (places + window).clamp(max=length - 1)
    torch.testing.assert_close(context, (first + last) / 2)


@pytest.mark.parametrize("length", [512, 4096])
def test_a_window_on_a_cpu_makes_only_the_scores_near_the_diagonal(length: int) -> None:
    scores = [
        (queries.stop - queries.start) * (keys.stop - keys.start) * (heads.stop - heads.start)
        for _, queries, keys, heads in local_pieces(((0, length),), 12, 64)
    ]
    assert sum(scores) <= 12 * length * 3 * 64
    assert max(scores) <= blocked_module.PIECE_SCORES


def test_relative_positions_keep_to_a_window() -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    attend = RelativeKeyAttention(9, 8, both_sides=True).double()
    torch.nn.init.zeros_(attend.distance.weight)
    expected = outcome(reference, rows, inputs, window=3)
    for actual, wanted in zip(outcome(attend, rows, inputs, window=3), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("piece", [1, 100, 2**18])
def test_blocked_is_the_same_however_it_is_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_module, "PIECE_SCORES", piece)
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    for actual, expected in zip(
        outcome(blocked, rows, inputs), outcome(reference, rows, inputs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.heavy
@pytest.mark.parametrize("window", [None, 2])
def test_blocked_gradients_are_those_of_its_own_dropout_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_module, "BLOCK_QUERIES", 3)
    rows = rows_of([5, 1, 4])
    inputs = random_heads(rows)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return blocked(q, k, v, rows, 0.4, window)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


def test_blocked_drops_probabilities_at_the_asked_rate_and_keeps_the_mean() -> None:
    """With equal keys all probabilities are 1/L, so a value of ones gives kept / (L (1 - rate))."""
    length, rate = 64, 0.1
    rows = rows_of([length] * 40)
    q = torch.zeros(40 * length, 2, 4)
    v = torch.ones_like(q)
    torch.manual_seed(0)
    kept = blocked(q, q, v, rows, rate)[..., 0] * (1 - rate)
    draws = 40 * length * length * 2
    assert abs(kept.mean().item() - (1 - rate)) < 4 * (rate * (1 - rate) / draws) ** 0.5
    counts = kept * length
    assert torch.allclose(counts, counts.round(), atol=1e-2)
    assert counts.var().item() == pytest.approx(length * rate * (1 - rate), rel=0.1)


def test_blocked_repeats_with_the_seed_and_changes_with_it() -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    contexts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        contexts.append(blocked(*inputs, rows, 0.3))
    assert torch.equal(contexts[0], contexts[1])
    assert not torch.equal(contexts[0], contexts[2])


@pytest.mark.parametrize("attend", [padded_sdpa, blocked])
def test_bf16_is_near_the_formula(attend: Attend) -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows, torch.bfloat16)
    exact = each(lambda x: x.detach().double().requires_grad_(), inputs)
    for actual, expected in zip(outcome(attend, rows, inputs), outcome(reference, rows, exact), strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 0.03


def test_a_row_never_sees_another() -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    for attend in (padded_sdpa, blocked, reference):
        context = attend(*inputs, rows, 0.0)
        changed = each(lambda x: x.detach().clone(), inputs)
        for x in changed:
            x[5:14] += 1.0  # the second row
        moved = (attend(*changed, rows, 0.0) != context).flatten(1).any(1)
        assert moved[5:14].all()
        assert not moved[:5].any()
        assert not moved[14:].any()


def test_no_tokens_at_all_keep_the_graph_whole() -> None:
    """An idle rank's batch: nothing to do, but every parameter must get a gradient."""
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 0)
    inputs = three(lambda: torch.zeros(0, 3, 8, requires_grad=True))
    context = automatic(*inputs, rows, 0.1)
    assert context.shape == (0, 3, 8)
    assert all(grad is not None for grad in torch.autograd.grad(context.sum(), inputs))


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
    assert window_size_left == window_size_right
    lengths = cu_q.diff().tolist()
    assert torch.equal(cu_q, cu_k)
    assert max_q == max_k == max(lengths)
    assert cu_q.dtype == torch.int32
    dropout, is_causal, return_debug_mask = rest
    assert (dropout, is_causal, return_debug_mask) == (0.0, False, False)
    q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    mask = torch.arange(max_k) < cu_k.diff()[:, None]
    at = torch.arange(max_k)
    near = (at[:, None] - at).abs() <= (max_k if window_size_left is None else window_size_left)
    seen = mask[:, None, None] & (near | ~mask[:, None, :, None])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    empty = torch.empty(0)
    return out.transpose(1, 2)[mask], empty, empty, empty, empty


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_varlen_passes_the_rows_to_the_operator(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operators:
        class aten:
            _flash_attention_forward = staticmethod(stand_in)

    rows = rows_of(lengths)
    inputs = random_heads(rows)
    expected = outcome(reference, rows, inputs, window=window)
    monkeypatch.setattr(torch, "ops", Operators)
    found = outcome(kernels.varlen_flash, rows, inputs, window=window)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 64])
def test_varlen_fits_the_real_operators_signature_and_derivative(window: int | None) -> None:
    """Shapes only, on the meta device: the operator accepts dropout and a window, and carries a derivative."""
    rows = Rows(
        torch.empty(4, dtype=torch.int32, device="meta"),
        torch.empty(20, dtype=torch.int64, device="meta"),
        9,
    )
    inputs = three(lambda: torch.empty(20, 3, 8, dtype=torch.bfloat16, device="meta", requires_grad=True))
    context = kernels.varlen_flash(*inputs, rows, 0.1, window)
    assert context.shape == (20, 3, 8)
    for grad in torch.autograd.grad(context.sum(), inputs):
        assert grad.shape == (20, 3, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 64])
def test_varlen_on_a_gpu_is_near_the_formula(window: int | None) -> None:
    rows = rows_of([300, 512, 1, 77])
    inputs = three(lambda: torch.randn(890, 4, 64, dtype=torch.bfloat16, requires_grad=True))
    exact = each(lambda x: x.detach().double().requires_grad_(), inputs)
    moved = Rows(rows.cu_seqlens.cuda(), rows.positions.cuda(), rows.max_length)
    on_gpu = each(lambda x: x.detach().cuda().requires_grad_(), inputs)
    context = automatic(*on_gpu, moved, 0.0, window)
    expected = reference(*exact, rows, 0.0, window)
    assert (context.cpu().double() - expected).abs().max() / expected.abs().max() < 0.02
    grads = torch.autograd.grad(context.double().square().sum(), on_gpu)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad.cpu().double() - want).abs().max() / want.abs().max() < 0.05


@pytest.mark.parametrize(
    ("device", "dtype", "width", "taken"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.bfloat16, 264, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_flash_is_chosen_where_it_exists(device: str, dtype: torch.dtype, width: int, taken: bool) -> None:
    assert flash_takes(device, dtype, width) is taken


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
    for name in ("flash_takes", "fused_takes"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda device, *kind, real=real: real("cuda", *kind))
    for name in ("varlen_flash", "fused", "padded_sdpa", "blocked", "written"):
        monkeypatch.setattr(
            kernels, name, lambda q, *given, name=name: used.append(name) or torch.empty_like(q)
        )
    rates = {"dropout": 0.1, "attention_dropout": 0.1}
    batch = make_batch([5, 20, 33, 1], 500).to(torch.device("meta"))
    for dropped in (False, True):
        model = network.model.model_copy(update={name: rate * dropped for name, rate in rates.items()})
        with torch.device("meta"):
            module = build(replace(network, model=model)).bfloat16()
        for training in (True, False):
            used.clear()
            module.train(training)(batch)
            expected = "fused" if dropped and training else "varlen_flash"
            students = network.objective.distil is not None  # its teachers drop nothing
            assert set(used) == {expected, "varlen_flash"} if students else {expected}, (dropped, training)
