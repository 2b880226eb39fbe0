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
    empty_sums,
    programs_per_head,
    table_gradient,
    tile_differences,
)
from encoder_core.kernels.tiling import Tiling, Tilings, choose_tilings, compute_generation, make_tile


@dataclass(frozen=True)
class Layout:
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
class Terms:
    """The terms of the scores; fields as in `operands.KernelInputs`."""

    r: Tensor | None = None
    table_a: Tensor | None = None
    table_b: Tensor | None = None
    table_c: Tensor | None = None
    segment_scores: Tensor | None = None


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, layout: Layout, cuts: Tilings | None = None
) -> Tensor:
    """Return the context [M, N, D]; it is 0 for a query that sees nothing. `cuts` None: those of `tiling.py`."""
    relative = (terms.r, terms.table_a, terms.table_b, terms.table_c, terms.segment_scores)
    used = cuts or choose_tilings(
        q.dtype,
        q.shape[-1],
        compute_generation(q.device),
        relative=any(term is not None for term in relative),
        by_keys=terms.table_b is not None,
        by_position=terms.table_c is not None,
    )
    return _apply(q, k, v, *relative, layout, used)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, layout, cuts = arguments
        tensors = [None if x is None else x.contiguous() for x in given]
        x = _kernel_inputs(tensors, layout)
        context = torch.empty_like(x.q)  # every query lies in a row, whose program writes its context
        log_sums = _empty_by_query(x)
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
        given = (x, grad.contiguous(), log_sums, _empty_by_query(x))
        _run_queries(given, context, by, layout, ctx.cuts.queries)
        _run_keys(given, by, layout, ctx.cuts.keys)
        return *by, None, None


_apply: Callable[..., Tensor] = _FusedAttention.apply


Inputs = tuple[KernelInputs, Tensor, Tensor, Tensor]
"""Inputs, the context's gradients, log2 of the sums of exponentials, and deltas: a query's context times its
gradient, which the kernel by queries writes first."""


def _run_queries(
    given: Inputs, context: Tensor, by: list[Tensor | None], layout: Layout, cut: Tiling
) -> None:
    """Write the deltas, and into `by` the gradients by queries, r, segment scores, and tables A and C."""
    x, grad, log_sums, deltas = given
    tiles = -(-layout.longest // cut.size)
    sums, programs = _sums_and_programs(x, (x.table_a, None, x.table_c), layout, tiles, cut.size)
    queries_kernel[(programs, x.heads)](
        x, grad, context, log_sums, deltas, by[0], by[3], by[7], sums, tiles, make_tile(x, cut.size), **cut.options
    )  # fmt: skip
    _add_up(sums, x, by, cut.size)


def _run_keys(given: Inputs, by: list[Tensor | None], layout: Layout, cut: Tiling) -> None:
    """Write the gradients by keys, values and table B into `by`."""
    x = given[0]
    longest = layout.longest if layout.longest_k is None else layout.longest_k
    tiles = -(-longest // cut.size) - (-x.carried // cut.size)
    sums, programs = _sums_and_programs(x, (None, x.table_b, None), layout, tiles, cut.size)
    keys_kernel[(programs, x.heads)](*given, by[1], by[2], sums, tiles, make_tile(x, cut.size), **cut.options)
    _add_up(sums, x, by, cut.size)


def _sums_and_programs(
    x: KernelInputs, tables: tuple[Tensor | None, ...], layout: Layout, tiles: int, size: int
) -> tuple[TableSums, int]:
    """Return the sums for a launch's gradients by tables A, B and C, and its number of programs for each head."""
    if all(table is None for table in tables):
        return TableSums(None, None, None, 0, 0), x.rows * tiles
    programs = programs_per_head(x.q.device, x.heads, x.rows * tiles)
    lowest, differences = tile_differences(
        layout.longest, x.carried, size, backwards=layout.signs is not None, causal=layout.causal
    )
    return empty_sums(tables, programs=programs, lowest=lowest, blocks=differences + 1, size=size), programs


def _add_up(sums: TableSums, x: KernelInputs, by: list[Tensor | None], size: int) -> None:
    first = sums.lowest * size - (size - 1) + x.center
    tables = (x.table_a, x.table_b, x.table_c)
    for number, (own, table) in enumerate(zip(sums[:3], tables, strict=True), 4):
        if own is not None:
            by[number] = table_gradient(own, table, first)


def _empty_by_query(x: KernelInputs) -> Tensor:
    """Return [M, N], unwritten, in the dtype of sums."""
    dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    return torch.empty(x.q.shape[:2], dtype=dtype, device=x.q.device)


def _kernel_inputs(tensors: list[Tensor | None], layout: Layout) -> KernelInputs:
    named = dict(zip(_TENSORS, tensors, strict=True))
    q = named["q"]
    assert q is not None
    tables = [len(table) for name in _TABLES if (table := named[name]) is not None]
    where = {name: value for name, value in vars(layout).items() if name not in _BY_HOST}
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
_BY_HOST = ("longest", "longest_k", "causal")
"""The fields of `Layout` that decide on launches, or are told to kernels in another form."""
