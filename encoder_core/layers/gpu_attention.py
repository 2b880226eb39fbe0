"""Attention kernels for GPUs that torch lacks: the fused attention of `encoder_core/kernels`, and FlashAttention-3.

The fused attention needs Triton, which comes with torch's CUDA builds. Its kernels are imported at their first use,
so that an installation without a GPU does not need Triton.

FlashAttention-3 (Shah et al., 2024) runs on Hopper GPUs, without dropout, if its package is installed. In torch it
replaces the built-in flash attention, behind the same operator and for the whole process. `switch_flash3` selects one
of them before a forward pass; the backward pass must come before the next switch. FlashAttention-3 is used only if a
trial (`encoder_core/trials`) prefers it. It has not been run on a GPU yet.

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

_MAX_HEAD_WIDTH = 128  # largest head width that the fused kernels support


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def fused_supports(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether the fused kernels support such heads: on CUDA with Triton (or the meta device), fp32 or half
    precision, up to 128 wide."""
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

    `key_rows`: rows of keys and values in cross-attention, where a query of row i sees their whole row i. `terms`:
    fields of `kernels.fused_attention.ScoreTerms`. `layout_fields`: further fields of `AttentionLayout`.
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
    """Return [T] int32, the index of the query at each token; -1 for tokens without a query."""
    assert query_rows.at is not None, "the flat token indices of the queries are unknown"
    slots = torch.full((rows.positions.numel(),), -1, dtype=torch.int32, device=rows.positions.device)
    queries = torch.arange(query_rows.at.numel(), dtype=torch.int32, device=slots.device)
    return slots.index_copy(0, query_rows.at, queries)


FLASH3 = "flash_attn_interface"  # module of FlashAttention-3's package
_HOPPER = 9  # major compute capability of Hopper GPUs
_HAS_FLASH3 = find_spec(FLASH3) is not None


def flash_supports(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether flash attention supports such heads: on CUDA, half precision, head width 8, 16, ..., 256."""
    return device in GPU_DEVICE_TYPES and dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def flash3_supports(device: torch.device, dtype: torch.dtype, width: int, dropout: float) -> bool:
    """Return whether FlashAttention-3 is installed, and supports this GPU and such heads."""
    if not _HAS_FLASH3 or device.type != "cuda" or dropout > 0.0:
        return False
    half = dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device)[0] == _HOPPER


def cudnn_supports(q_TND: Float[Tensor, "tokens heads width"], rows: Rows, dropout: float) -> bool:
    """Return whether torch's cuDNN attention supports such rows. They must have equal lengths: for others, torch's
    wrapper (`nn/attention/varlen.py`) disables cuDNN up to 2.13. In deterministic mode torch refuses it, because its
    backward pass sums in varying order.
    """
    if q_TND.device.type != "cuda" or dropout > 0.0 or not rows.is_full:
        return False
    q_RNLD = rows.pad(q_TND).transpose(1, 2)
    given = torch.backends.cuda.SDPAParams(q_RNLD, q_RNLD, q_RNLD, None, dropout, rows.causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def switch_flash3(wanted: bool) -> None:
    """Switch torch's flash attention to FlashAttention-3 if `wanted`, else to the built-in version. Without the package
    of version 3, nothing happens.

    Raises:
        ImportError, RuntimeError: the package of version 3 does not work on this machine.
    """
    if not _HAS_FLASH3:
        return
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    if wanted and current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")
    elif not wanted and current_flash_attention_impl() == "FA3":
        restore_flash_attention_impl()
