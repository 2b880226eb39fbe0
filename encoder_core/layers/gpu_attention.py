"""Attention kernels of GPUs that torch does not bring: the fused attention of `encoder_core/kernels`, and
FlashAttention-3.

The fused attention needs Triton, which comes with torch's CUDA builds. Its kernels are imported when one is first used,
so that an installation without a GPU does not need Triton.

FlashAttention-3 (Shah et al., 2024) runs on Hopper GPUs, without dropout, where its package is installed. torch
registers it in place of its own flash attention, for the whole process. So one operator calls both, and `activate` says
before a forward pass which of the two it is; the backward pass must follow before the other is activated. A trial may
prefer it; it is never the usual kernel. It has not met a GPU.

Shapes: T tokens, M queries, N heads, D head width, E distances.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.layers.dropout import inverse_rate, threshold_of
from encoder_core.layers.rows import Rows
from encoder_core.random_draws import draw_key

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


PACKAGE = "flash_attn_interface"
_HOPPER = 9  # compute capability
_INSTALLED = find_spec(PACKAGE) is not None


def flash_takes(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether the varlen flash kernel takes these: CUDA, half precision, head width 8, 16, ..., 256."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def flash3_takes(device: torch.device, dtype: torch.dtype, width: int, dropout: float) -> bool:
    """Whether it takes tensors that torch's own flash attention takes."""
    if not _INSTALLED or device.type != "cuda" or dropout > 0.0:
        return False
    half = dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device)[0] == _HOPPER


def activate(wanted: bool) -> None:
    """From here on torch's flash attention is version 3, or its own again. Nothing is done where there is no package.

    Raises ImportError, RuntimeError: the package does not work here.
    """
    if not _INSTALLED:
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
