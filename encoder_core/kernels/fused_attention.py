"""Fused attention with relative terms over flat tokens, on a GPU, forward and backward.

No stored tensor grows with the square of a row. `operands.py` has the formula; `forward.py` and `backward.py` have the
kernels, and `table_gradients.py` adds up gradients by tables. The forward pass saves its inputs, the context and one
number for each query and head.

Shapes: as in `operands.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.kernels.backward import keys_kernel, queries_kernel
from encoder_core.kernels.forward import forward_kernel
from encoder_core.kernels.operands import KernelInputs
from encoder_core.kernels.table_gradients import (
    TableSums,
    programs_per_head,
    table_gradient,
    tile_differences,
    zero_sums,
)
from encoder_core.kernels.tiling import Tiling, Tilings, choose_tilings, compute_generation, make_tile


@dataclass(frozen=True)
class AttentionLayout:
    """Where tokens are and what they see; fields as in `operands.KernelInputs`.

    Attributes:
        longest: number of tokens in the longest row.
        longest_k: number of keys in the longest row of `cu_seqlens_k`; None without it.
        causal: whether a query sees no later key.
    """

    cu_seqlens: Tensor
    longest: int
    scale: float
    segments_q: Tensor | None = None
    segments_k: Tensor | None = None
    ranks_q: Tensor | None = None
    ranks_k: Tensor | None = None
    slots: Tensor | None = None
    signs: Tensor | None = None
    draws: Tensor | None = None
    carried: int = 0
    center: int = 0
    window: int | None = None
    causal: bool = False
    cu_seqlens_k: Tensor | None = None
    longest_k: int | None = None
    threshold: int = 0
    inverse: float = 1.0


@dataclass(frozen=True)
class ScoreTerms:
    """The terms of the scores; fields as in `operands.KernelInputs`."""

    r: Tensor | None = None
    table_a: Tensor | None = None
    table_b: Tensor | None = None
    table_c: Tensor | None = None
    segment_scores: Tensor | None = None


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: ScoreTerms,
    layout: AttentionLayout,
    tilings: Tilings | None = None,
) -> Tensor:
    """Return the context [M, N, D]; it is 0 for a query that sees nothing. `tilings` None: those of `tiling.py`."""
    relative = (terms.r, terms.table_a, terms.table_b, terms.table_c, terms.segment_scores)
    used = tilings or choose_tilings(
        q.dtype,
        q.shape[-1],
        compute_generation(q.device),
        has_relative_terms=any(term is not None for term in relative),
        has_table_b=terms.table_b is not None,
        has_table_c=terms.table_c is not None,
    )
    return _apply(q, k, v, *relative, layout, used)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, layout, cuts = arguments
        tensors = [None if x is None else x.contiguous() for x in given]
        x = _kernel_inputs(tensors, layout)
        context = torch.empty_like(x.q)  # every query lies in a row, whose program writes its context
        log_sums = _empty_per_query(x)
        if x.rows and layout.longest:
            tiles = -(-layout.longest // cuts.forward.size)
            forward_kernel[(x.rows * tiles, x.heads)](
                x, context, log_sums, tiles, make_tile(x, cuts.forward.size), **cuts.forward.options
            )
        ctx.save_for_backward(*tensors, context, log_sums)
        ctx.layout, ctx.cuts = layout, cuts
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, context, log_sums = ctx.saved_tensors
        x, layout = _kernel_inputs(tensors, ctx.layout), ctx.layout
        if not (x.rows and layout.longest):
            return *(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors), None, None
        # Every token lies in a row, whose program writes the token's gradients.
        by = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
        given = (x, grad.contiguous(), log_sums, _empty_per_query(x))
        _run_query_kernel(given, context, by, layout, ctx.cuts.queries)
        _run_key_kernel(given, by, layout, ctx.cuts.keys)
        return *by, None, None


_apply: Callable[..., Tensor] = _FusedAttention.apply


BackwardInputs = tuple[KernelInputs, Tensor, Tensor, Tensor]
"""Inputs, the context's gradients, log2 of the sums of exponentials, and deltas: a query's context times its
gradient, which the kernel by queries writes first."""


def _run_query_kernel(
    inputs: BackwardInputs,
    context: Tensor,
    gradients: list[Tensor | None],
    layout: AttentionLayout,
    tiling: Tiling,
) -> None:
    """Write the deltas, and into `gradients` the gradients by queries, r, segment scores, and tables A and C."""
    x, grad, log_sums, deltas = inputs
    tiles = -(-layout.longest // tiling.size)
    sums, programs = _sums_and_programs(x, (x.table_a, None, x.table_c), layout, tiles, tiling.size)
    queries_kernel[(programs, x.heads)](
        x, grad, context, log_sums, deltas, gradients[0], gradients[3], gradients[7], sums, tiles,
        make_tile(x, tiling.size), **tiling.options,
    )  # fmt: skip
    _write_table_gradients(sums, x, gradients, tiling.size)


def _run_key_kernel(
    inputs: BackwardInputs, gradients: list[Tensor | None], layout: AttentionLayout, tiling: Tiling
) -> None:
    """Write the gradients by keys, values and table B into `gradients`."""
    x = inputs[0]
    longest = layout.longest if layout.longest_k is None else layout.longest_k
    tiles = -(-longest // tiling.size) - (-x.carried // tiling.size)
    sums, programs = _sums_and_programs(x, (None, x.table_b, None), layout, tiles, tiling.size)
    keys_kernel[(programs, x.heads)](
        *inputs, gradients[1], gradients[2], sums, tiles, make_tile(x, tiling.size), **tiling.options
    )
    _write_table_gradients(sums, x, gradients, tiling.size)


def _sums_and_programs(
    x: KernelInputs, tables: tuple[Tensor | None, ...], layout: AttentionLayout, tiles: int, size: int
) -> tuple[TableSums, int]:
    """Return the sums for a launch's gradients by tables A, B and C, and its number of programs for each head."""
    if all(table is None for table in tables):
        return TableSums(None, None, None, 0, 0), x.rows * tiles
    programs = programs_per_head(x.q.device, x.heads, x.rows * tiles)
    lowest, differences = tile_differences(
        layout.longest, x.carried, size, backwards=layout.signs is not None, causal=layout.causal
    )
    return zero_sums(tables, programs=programs, lowest=lowest, blocks=differences + 1, size=size), programs


def _write_table_gradients(sums: TableSums, x: KernelInputs, gradients: list[Tensor | None], size: int) -> None:
    first = sums.lowest * size - (size - 1) + x.center
    tables = (x.table_a, x.table_b, x.table_c)
    for number, (own, table) in enumerate(zip(sums[:3], tables, strict=True), 4):
        if own is not None:
            gradients[number] = table_gradient(own, table, first)


def _empty_per_query(x: KernelInputs) -> Tensor:
    """Return [M, N], unwritten, in the dtype of sums."""
    dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    return torch.empty(x.q.shape[:2], dtype=dtype, device=x.q.device)


def _kernel_inputs(tensors: list[Tensor | None], layout: AttentionLayout) -> KernelInputs:
    named = dict(zip(_TENSORS, tensors, strict=True))
    q = named["q"]
    assert q is not None
    tables = [len(table) for name in _TABLES if (table := named[name]) is not None]
    where = {name: value for name, value in vars(layout).items() if name not in _HOST_FIELDS}
    return KernelInputs(
        **named,
        **where,
        heads=q.shape[1],
        rows=layout.cu_seqlens.numel() - 1,
        distances=tables[0] if tables else 0,
        causal=1 if layout.causal else None,
    )


_TABLES = ("table_a", "table_b", "table_c")
_TENSORS = ("q", "k", "v", "r", *_TABLES, "segment_scores")
"""The tensors of `KernelInputs` that autograd knows, in the order of the function's arguments."""
_HOST_FIELDS = ("longest", "longest_k", "causal")
"""The fields of `AttentionLayout` that decide on launches, or are told to kernels in another form."""
