"""The fused attention of `encoder_core/kernels`, given rows: where it runs, and what its kernels want to know of rows.

The kernels need Triton, which comes with torch's CUDA builds. They are imported when one is first used, so that an
installation without a GPU does not need it.

Shapes: T tokens, M queries, N heads, D head width, E distances.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.draws import draw_key
from encoder_core.layers.dropout import inverse_rate, threshold_of
from encoder_core.layers.rows import Rows

_WIDEST = 128


@cache
def triton_is_there() -> bool:
    return find_spec("triton") is not None


def fused_takes(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels take heads of this kind: on CUDA with Triton, fp32 or half precision, up to 128 wide."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return device == "cuda" and dtype in kinds and width <= _WIDEST and triton_is_there()


def fused_attention(
    q_MND: Float[Tensor, "queries heads width"],
    k_KND: Float[Tensor, "keys heads width"],
    v_KND: Float[Tensor, "keys heads width"],
    *,
    query_rows: Rows,
    rows: Rows,
    scale: float,
    dropout: float,
    terms: dict[str, Tensor | None] | None = None,
    **where: Any,
) -> Float[Tensor, "queries heads width"]:
    """Context of the queries, which are the tokens themselves where `query_rows` is `rows`.

    `terms` are the fields of `kernels.fused_attention.Terms`, `where` further fields of its `Layout`.
    """
    from encoder_core.kernels import fused_attention as kernels

    threshold = threshold_of(dropout)
    layout = kernels.Layout(
        cu_seqlens=rows.cu_seqlens,
        longest=rows.max_length,
        scale=scale,
        slots=None if query_rows is rows else slots_of(query_rows, rows),
        draws=query_rows.keys + draw_key() if threshold else None,
        threshold=threshold,
        inverse=inverse_rate(threshold),
        **where,
    )
    return kernels.fused_attention(q_MND, k_KND, v_KND, kernels.Terms(**(terms or {})), layout)


def slots_of(query_rows: Rows, rows: Rows) -> Int[Tensor, " tokens"]:
    """[T] int32, which query stands at each token, -1 for none."""
    assert query_rows.at is not None, "queries whose places are not known"
    slots = torch.full((rows.positions.numel(),), -1, dtype=torch.int32, device=rows.positions.device)
    queries = torch.arange(query_rows.at.numel(), dtype=torch.int32, device=slots.device)
    return slots.index_copy(0, query_rows.at, queries)
