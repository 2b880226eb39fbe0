"""Every attention kernel against the formula: values, gradients, and what dropout does."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from encoder_core.layers import attention as kernels
from encoder_core.layers import cpu_attention as blocked_module
from encoder_core.layers.attention import Attend, automatic, blocked, flash_takes, padded_sdpa, reference
from encoder_core.layers.rows import Rows
from tests.support.models.parity import rows_of

LENGTHS = {"mixed": [5, 9, 1, 9, 2], "equal": [7, 7, 7], "one_row": [11]}


def random_heads(rows: Rows, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows.positions.numel(), 3, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3)]


def outcome(attend: Attend, rows: Rows, inputs: list[Tensor], dropout: float = 0.0) -> list[Tensor]:
    """The context, and gradients of a weighted sum of it."""
    context = attend(*inputs, rows, dropout)
    weights = torch.linspace(-1, 2, context.numel(), dtype=context.dtype).view_as(context)
    return [context, *torch.autograd.grad((context * weights).sum(), inputs)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("attend", [automatic, padded_sdpa, blocked])
def test_equals_the_formula(attend: Attend, lengths: list[int]) -> None:
    rows = rows_of(lengths)
    inputs = random_heads(rows)
    for actual, expected in zip(outcome(attend, rows, inputs), outcome(reference, rows, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("piece", [1, 100, 2**18])
def test_blocked_is_the_same_however_it_is_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_module, "PIECE", piece)
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    for actual, expected in zip(
        outcome(blocked, rows, inputs), outcome(reference, rows, inputs), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.heavy
def test_blocked_gradients_are_those_of_its_own_dropout_mask() -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return blocked(q, k, v, rows, 0.4)

    assert torch.autograd.gradcheck(attend, inputs)


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
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for actual, expected in zip(outcome(attend, rows, inputs), outcome(reference, rows, exact), strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 0.03


def test_a_row_never_sees_another() -> None:
    rows = rows_of(LENGTHS["mixed"])
    inputs = random_heads(rows)
    for attend in (padded_sdpa, blocked, reference):
        context = attend(*inputs, rows, 0.0)
        changed = [x.detach().clone() for x in inputs]
        for x in changed:
            x[5:14] += 1.0  # the second row
        moved = (attend(*changed, rows, 0.0) != context).flatten(1).any(1)
        assert moved[5:14].all()
        assert not moved[:5].any()
        assert not moved[14:].any()


def test_no_tokens_at_all_keep_the_graph_whole() -> None:
    """An idle rank's batch: nothing to do, but every parameter must get a gradient."""
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 0)
    inputs = [torch.zeros(0, 3, 8, requires_grad=True) for _ in range(3)]
    context = automatic(*inputs, rows, 0.1)
    assert context.shape == (0, 3, 8)
    assert all(grad is not None for grad in torch.autograd.grad(context.sum(), inputs))


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *rest: object
):
    """torch's flash operator, for a processor: same arguments, same five results, no dropout."""
    lengths = cu_q.diff().tolist()
    assert torch.equal(cu_q, cu_k)
    assert max_q == max_k == max(lengths)
    assert cu_q.dtype == torch.int32
    dropout, is_causal, return_debug_mask = rest
    assert (dropout, is_causal, return_debug_mask) == (0.0, False, False)
    q, k, v = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    mask = torch.arange(max_k) < cu_k.diff()[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    empty = torch.empty(0)
    return out.transpose(1, 2)[mask], empty, empty, empty, empty


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_varlen_passes_the_rows_to_the_operator(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Operators:
        class aten:
            _flash_attention_forward = staticmethod(stand_in)

    rows = rows_of(lengths)
    inputs = random_heads(rows)
    expected = outcome(reference, rows, inputs)
    monkeypatch.setattr(torch, "ops", Operators)
    for actual, wanted in zip(outcome(kernels.varlen_flash, rows, inputs), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_varlen_fits_the_real_operators_signature_and_derivative() -> None:
    """Shapes only, on the meta device: the operator accepts dropout and carries a derivative."""
    rows = Rows(
        torch.empty(4, dtype=torch.int32, device="meta"),
        torch.empty(20, dtype=torch.int64, device="meta"),
        9,
    )
    inputs = [
        torch.empty(20, 3, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)
    ]
    context = kernels.varlen_flash(*inputs, rows, 0.1)
    assert context.shape == (20, 3, 8)
    for grad in torch.autograd.grad(context.sum(), inputs):
        assert grad.shape == (20, 3, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_varlen_on_a_gpu_is_near_the_formula() -> None:
    rows = rows_of([300, 512, 1, 77])
    inputs = [torch.randn(890, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    moved = Rows(rows.cu_seqlens.cuda(), rows.positions.cuda(), rows.max_length)
    on_gpu = [x.detach().cuda().requires_grad_() for x in inputs]
    context = automatic(*on_gpu, moved, 0.0)
    expected = reference(*exact, rows, 0.0)
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
