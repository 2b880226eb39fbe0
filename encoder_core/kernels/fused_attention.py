"""Fused attention over flat tokens, with relative-position terms, on a GPU, forward and backward.

No stored tensor grows with the square of a row's length. `operands.py` has the formula, `forward.py` and `backward.py`
have the kernels, and `table_gradients.py` adds up the gradients of tables. The forward pass saves its inputs, the
context and one number for each query and head.

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
    """The bounds of rows, and which keys a query sees. The fields are those of `operands.KernelInputs`, except:

    Attributes:
        longest: number of tokens in the longest row.
        longest_k: number of keys in the longest row of `cu_seqlens_k`; None without `cu_seqlens_k`.
        causal: whether later keys are hidden from queries.
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
    """The score terms besides q . k; the fields are those of `operands.KernelInputs`."""

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
    """Return the context [M, N, D], 0 for a query that sees no key. `tilings` None: those of `choose_tilings`."""
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
    """The autograd function of `fused_attention`: (tensors of `_TENSORS`, layout, tilings) -> context."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, layout, used_tilings = arguments
        tensors = [None if x is None else x.contiguous() for x in given]
        x = _kernel_inputs(tensors, layout)
        context = torch.empty_like(x.q)  # programs write every query's context
        log_sums = _empty_per_query(x)
        if x.rows and layout.longest:
            tiles = -(-layout.longest // used_tilings.forward.size)
            forward_kernel[(x.rows * tiles, x.heads)](
                x, context, log_sums, tiles, make_tile(x, used_tilings.forward.size), **used_tilings.forward.options
            )
        ctx.save_for_backward(*tensors, context, log_sums)
        ctx.layout, ctx.used_tilings = layout, used_tilings
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, context, log_sums = ctx.saved_tensors
        x, layout = _kernel_inputs(tensors, ctx.layout), ctx.layout
        if not (x.rows and layout.longest):
            return *(None if tensor is None else torch.zeros_like(tensor) for tensor in tensors), None, None
        # Uninitialised, because every token is in a row, and the row's programs write its gradients.
        by = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
        given = (x, grad.contiguous(), log_sums, _empty_per_query(x))
        _run_query_kernel(given, context, by, layout, ctx.used_tilings.queries)
        _run_key_kernel(given, by, layout, ctx.used_tilings.keys)
        return *by, None, None


_apply: Callable[..., Tensor] = _FusedAttention.apply


BackwardInputs = tuple[KernelInputs, Tensor, Tensor, Tensor]
"""Inputs, gradients of the context, log2 of the sums of exponentials, and deltas (`backward.py`), which
`queries_kernel` writes and `keys_kernel` reads."""


def _run_query_kernel(
    inputs: BackwardInputs,
    context: Tensor,
    gradients: list[Tensor | None],
    layout: AttentionLayout,
    tiling: Tiling,
) -> None:
    """Write the deltas, and in `gradients` (ordered as `_TENSORS`) those of q, r, segment scores, tables A and C."""
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
    """Write the gradients of keys, values and table B into `gradients` (ordered as `_TENSORS`)."""
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
    """Return zero sums for the gradients of a launch's tables, and the launch's number of programs per head."""
    if all(table is None for table in tables):
        return TableSums(None, None, None, 0, 0), x.rows * tiles
    programs = programs_per_head(x.q.device, x.heads, x.rows * tiles)
    lowest, differences = tile_differences(
        layout.longest, x.carried, size, backwards=layout.signs is not None, causal=layout.causal
    )
    return zero_sums(tables, programs=programs, lowest=lowest, blocks=differences + 1, size=size), programs


def _write_table_gradients(sums: TableSums, x: KernelInputs, gradients: list[Tensor | None], size: int) -> None:
    """Add up the programs' sums, and write the gradients of the tables into `gradients`."""
    first = sums.lowest * size - (size - 1) + x.center
    tables = (x.table_a, x.table_b, x.table_c)
    for number, (own, table) in enumerate(zip(sums[:3], tables, strict=True), 4):
        if own is not None:
            gradients[number] = table_gradient(own, table, first)


def _empty_per_query(x: KernelInputs) -> Tensor:
    """Return an uninitialised [M, N] tensor in the dtype of sums."""
    dtype = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    return torch.empty(x.q.shape[:2], dtype=dtype, device=x.q.device)


def _kernel_inputs(tensors: list[Tensor | None], layout: AttentionLayout) -> KernelInputs:
    """Return the kernels' inputs. `tensors`: those of `_TENSORS`, in this order; None for absent ones."""
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
"""The tensors of `KernelInputs` that have gradients, in the order of `_FusedAttention`'s arguments."""
_HOST_FIELDS = ("longest", "longest_k", "causal")
"""The fields of `AttentionLayout` that only launches need, or that kernels take in another form."""
