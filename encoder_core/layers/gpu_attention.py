"""The fused attention of `encoder_core/kernels`, where it runs, and where flash attention does.

The fused attention needs Triton, which comes with torch's CUDA builds. Its kernels are imported at their first use,
so that an installation without a GPU does not need Triton.

Shapes: T tokens, M queries, N heads, D head width, E distances.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.layers.dropout import drop_threshold, kept_scale
from encoder_core.layers.planned import SCORE_TERMS, is_planned, planned_attention
from encoder_core.layers.rows import Rows
from encoder_core.layers.sizes import GPU_DEVICE_TYPES
from encoder_core.random_draws import draw_key

_MAX_HEAD_WIDTH = 128


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def fused_supports(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether the fused kernels support such heads: on CUDA with Triton, fp32 or half precision, up to 128
    wide.
    """
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    there = device == "meta" or (device == "cuda" and has_triton())
    return there and dtype in kinds and width <= _MAX_HEAD_WIDTH


def fused_attention(
    q_MND: Float[Tensor, "queries heads width"],
    k_KND: Float[Tensor, "keys heads width"],
    v_KND: Float[Tensor, "keys heads width"],
    *,
    query_rows: Rows,
    rows: Rows,
    key_rows: Rows | None = None,
    scale: float,
    dropout: float,
    terms: dict[str, Tensor | None] | None = None,
    **layout_fields: Any,
) -> Float[Tensor, "queries heads width"]:
    """Return the context of the queries, which are the tokens themselves if `query_rows` is `rows`.

    `key_rows` are the rows of keys and values, if these are other tokens: then queries see the same row of them, whole.
    `terms` are the fields of `kernels.fused_attention.ScoreTerms`, `layout_fields` further fields of its `Layout`.
    """
    if is_planned(q_MND):
        given = (q_MND, k_KND, v_KND, *((terms or {}).get(name) for name in SCORE_TERMS))
        return planned_attention(
            given,
            rows,
            carried=layout_fields.get("carried", 0),
            window=layout_fields.get("window"),
            keys=None if key_rows is None else key_rows.max_length,
        )
    from encoder_core.kernels import fused_attention as kernels

    threshold = drop_threshold(dropout)
    layout = kernels.AttentionLayout(
        cu_seqlens=rows.cu_seqlens,
        longest=rows.max_length,
        scale=scale,
        slots=None if query_rows is rows else query_slots(query_rows, rows),
        draws=query_rows.random_keys + draw_key() if threshold else None,
        threshold=threshold,
        inverse=kept_scale(threshold),
        causal=rows.causal and key_rows is None,
        cu_seqlens_k=None if key_rows is None else key_rows.cu_seqlens,
        longest_k=None if key_rows is None else key_rows.max_length,
        **layout_fields,
    )
    return kernels.fused_attention(q_MND, k_KND, v_KND, kernels.ScoreTerms(**(terms or {})), layout)


def query_slots(query_rows: Rows, rows: Rows) -> Int[Tensor, " tokens"]:
    """Return [T] int32, the index of the query at each token, or -1."""
    assert query_rows.at is not None, "the flat token indices of the queries are unknown"
    slots = torch.full((rows.positions.numel(),), -1, dtype=torch.int32, device=rows.positions.device)
    queries = torch.arange(query_rows.at.numel(), dtype=torch.int32, device=slots.device)
    return slots.index_copy(0, query_rows.at, queries)


def flash_supports(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether flash attention supports such heads: on CUDA, half precision, head width 8, 16, ..., 256."""
    return device in GPU_DEVICE_TYPES and dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
