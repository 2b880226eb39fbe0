"""Stand-ins for GPU kernels on torch's meta device, whose tensors have no data: they count FLOPs and memory.

`encoder_core/train/counting.py` runs networks on the meta device to count their FLOPs and memory on a GPU, on machines
without a GPU, Triton or torch's CUDA build. Layers then take the same path as on a GPU, and call these functions where
they would launch our kernels. Each returns tensors of the kernel's shapes, saves the tensors that the kernel saves for
the backward pass, and reports its FLOPs. A test compares the saved tensors with those of the kernels.

All FLOP formulas that torch lacks are here. Attention counts the visible pairs of query and key: one product for
scores, one for values, and one for each table of relative positions, and twice as many in the backward pass. Scores
that fused kernels recompute in the backward pass do not count, as is usual for utilisation.

Shapes: M queries, K keys, N heads, D head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.layers.kernel_choice import Preference, current_preference, set_preference
from encoder_core.layers.rows import Rows
from encoder_core.layers.torch_internals import attention_operators, efficient_attention

SCORE_TERMS = ("r", "table_a", "table_b", "table_c", "segment_scores")
"""Names of the score terms besides q . k, in the order of `kernels.fused_attention.ScoreTerms`."""

_reported_flops: list[int] | None = None  # FLOPs of each stand-in that has run; None: not recorded


def collect_flops(into: list[int] | None) -> None:
    """Let the functions below append their FLOPs to the list `into`; None: FLOPs are not recorded."""
    global _reported_flops
    _reported_flops = into


def _report_flops(flops: int) -> None:
    if _reported_flops is not None:
        _reported_flops.append(flops)


def visible_pair_count(length: int, window: int | None, *, causal: bool) -> int:
    """Return the number of pairs of a query and a key that it sees, in a row of `length` tokens. `window`: number of
    tokens visible on each side; None: the whole row.
    """
    reach = length - 1 if window is None else min(window, length - 1)
    before = reach * length - reach * (reach + 1) // 2
    return length + before * (1 if causal else 2)


def is_planned(x: Tensor) -> bool:
    """Return whether `x` is on the meta device, so that stand-ins replace our kernels."""
    return x.is_meta


def planned_attention(
    tensors: Sequence[Tensor | None],
    rows: Rows,
    *,
    carried: int = 0,
    window: int | None = None,
    keys: int | None = None,
) -> Tensor:
    """Stand in for fused attention: return a context [M, N, D] without data.

    Args:
        tensors: queries, keys, values, and the tensors of `SCORE_TERMS`.
        rows: the rows of tokens; FLOPs are counted as if all were as long as the longest.
        carried: number of memory tokens before each row.
        keys: number of keys that each query sees in cross-attention; None: self-attention.
    """
    query = tensors[0]
    assert query is not None
    longest = max(rows.max_length, 1)
    seen = visible_pair_count(longest, window, causal=rows.causal) / longest + carried if keys is None else keys
    tables = sum(table is not None for table in tensors[4:6])
    flops = round(2 * query.numel() * seen) * (2 + tables)
    return _attention(flops, *tensors)


class _Attention(torch.autograd.Function):
    """Stand-in for `kernels.fused_attention`; saves the same tensors for the backward pass."""

    @staticmethod
    def forward(ctx: Any, flops: int, *given: Tensor | None) -> Tensor:
        tensors = [None if x is None else x.contiguous() for x in given]
        query = tensors[0]
        assert query is not None
        _report_flops(flops)
        context = torch.empty_like(query)
        ctx.save_for_backward(*tensors, context, _empty_sums(query))
        ctx.flops = flops
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, _, _ = ctx.saved_tensors
        _report_flops(2 * ctx.flops)
        deltas = _empty_sums(tensors[0])
        del deltas
        return None, *(None if x is None else torch.empty_like(x) for x in tensors)


_attention: Callable[..., Tensor] = _Attention.apply


def _empty_sums(query: Tensor) -> Tensor:
    """Return an uninitialised tensor with one number for each query and head, in the dtype of sums."""
    return query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))


class _Norm(torch.autograd.Function):
    """Stand-in for `kernels.residual_norm`; saves the same tensors for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        draws: Tensor | None,
        centered: bool,
    ) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        scale = x.new_empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32))
        mean = torch.empty_like(scale) if centered else None
        ctx.save_for_backward(total, weight, draws, mean, scale)
        ctx.set_materialize_grads(False)
        ctx.bias = bias
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, draws, _, _ = ctx.saved_tensors
        by_residual = torch.empty_like(total)
        by_x = by_residual if draws is None else torch.empty_like(total)
        by_bias = None if ctx.bias is None else torch.empty_like(ctx.bias)
        return by_x, by_residual, torch.empty_like(weight), by_bias, None, None


planned_norm: Callable[..., tuple[Tensor, Tensor]] = _Norm.apply


class _RmsNorm(torch.autograd.Function):
    """Stand-in for torch's RMSNorm, which has a fused kernel on GPUs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_normed: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


planned_rms_norm: Callable[..., Tensor] = _RmsNorm.apply


def planned_sdpa(
    q_RNQD: Tensor,
    k_RNKD: Tensor,
    v_RNKD: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Run torch's memory-efficient attention, which torch has for GPUs only, on the meta device."""
    if mask is not None:
        mask = mask.to(q_RNQD.dtype).expand(*q_RNQD.shape[:3], k_RNKD.shape[2])
    return efficient_attention(q_RNQD, k_RNKD, v_RNKD, mask, dropout_p=dropout, is_causal=causal, scale=scale)


def _flash_forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    cu_k: Tensor,
    longest: int,
    longest_k: int,
    *further: Any,
    **options: Any,
) -> int:
    """Return the FLOPs of torch's flash attention over rows. `further`: dropout, whether rows are causal, and more."""
    window = options.get("window_size_left")
    window = None if window == -1 else window
    across = longest != longest_k
    seen = longest_k if across else visible_pair_count(longest, window, causal=further[1]) / longest
    return round(4 * q.numel() * seen)


def _flash_backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rows: Any, **options: Any
) -> int:
    return 2 * _flash_forward_flops(q, k, v, *rows, **options)


def _efficient_forward_flops(q: Tensor, k: Tensor, *further: Any, **options: Any) -> int:
    """Return the FLOPs of memory-efficient attention on rectangles [R, N, L, D]; masked scores count."""
    return 4 * q.numel() * k.shape[2]


def _efficient_backward_flops(grad: Tensor, q: Tensor, k: Tensor, *further: Any, **options: Any) -> int:
    return 2 * _efficient_forward_flops(q, k)


def _product_flops(summed: Tensor, a: Tensor, b: Tensor, **options: Any) -> int:
    """Return the FLOPs of summed.addmm_(a, b)."""
    return 2 * a.numel() * b.shape[1]


def flop_formulas() -> dict[Any, Any]:
    """Return by operator the function that counts its FLOPs from its arguments: torch's functions, and ours for
    operators that torch does not count or counts differently."""
    from torch.utils.flop_counter import flop_registry  # imported here, because it imports Triton if installed

    each = (_flash_forward_flops, _flash_backward_flops, _efficient_forward_flops, _efficient_backward_flops)
    ours = {torch.ops.aten.addmm_: _product_flops, **dict(zip(attention_operators(), each, strict=True))}
    return flop_registry | ours


@contextmanager
def planned_for_gpu() -> Iterator[None]:
    """Inside the block, layers choose kernels as on a GPU where a trial has found all our kernels correct."""
    before = current_preference()
    set_preference(Preference((), (), {"norm": ("fused", "written")}))
    try:
        yield
    finally:
        set_preference(before)
