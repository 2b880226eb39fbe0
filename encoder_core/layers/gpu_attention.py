"""Attention kernels for GPUs: the fused attention of `encoder_core/kernels`, FlashAttention-3 and -4, and torch's own.

The fused attention needs Triton, which comes with torch's CUDA builds. Its kernels are imported at their first use,
so that an installation without a GPU does not need Triton.

FlashAttention-3 (Shah et al., 2024) and -4 run on recent GPUs, without dropout, if their packages are installed. In
torch such a release replaces the built-in flash attention, behind the same operator and for the whole process.
`switch_flash` selects one of them before a forward pass; the backward pass must come before the next switch. A release
is used only if a trial (`encoder_core/trials`) prefers it. None has been run on a GPU by these layers yet.

Shapes: T tokens, M queries, N heads, D head width, E distances.
"""

from contextlib import nullcontext
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from encoder_core.layers.dropout import drop_threshold, kept_scale
from encoder_core.layers.kernel_choice import Kernel
from encoder_core.layers.planned import SCORE_TERMS, is_planned, planned_attention
from encoder_core.layers.rows import Rows, repeat_shared_heads
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


_HALF_PRECISION = (torch.bfloat16, torch.float16)


class FlashRelease(NamedTuple):
    """A newer release of flash attention.

    Attributes:
        name: its name in `torch.nn.attention.activate_flash_attention_impl`.
        package: its package, or the path of its subpackage.
        distribution: what pip calls it.
        generations: major compute capabilities of the GPUs that it supports.
        max_width: largest head width on all of them.
    """

    name: str
    package: str
    distribution: str
    generations: tuple[int, ...]
    max_width: int

    def is_installed(self) -> bool:
        """Return whether the package is there, without importing it: older releases have the same parent package."""
        parent, _, child = self.package.partition("/")
        found = find_spec(parent)
        folders = [] if found is None else found.submodule_search_locations or []
        return found is not None and (not child or any(Path(folder, child).is_dir() for folder in folders))


_RELEASES: dict[Kernel, FlashRelease] = {
    "flash3": FlashRelease("FA3", "flash_attn_interface", "flash_attn_3", (9,), 256),
    "flash4": FlashRelease("FA4", "flash_attn/cute", "flash-attn-4", (9, 10), 128),
}
_installed = {kernel: release for kernel, release in _RELEASES.items() if release.is_installed()}


def newer_flash_versions() -> dict[str, str]:
    """Return the version of each installed release of flash attention, by kernel; "" if pip does not know it."""
    known = {kernel: list(metadata.distributions(name=one.distribution)) for kernel, one in _installed.items()}
    return {kernel: found[0].version if found else "" for kernel, found in known.items()}


def flash_supports(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether flash attention supports such heads: on CUDA, half precision, head width 8, 16, ..., 256."""
    return device in GPU_DEVICE_TYPES and dtype in _HALF_PRECISION and width % 8 == 0 and width <= 256


def newer_flash_kernels(device: torch.device, dtype: torch.dtype, width: int) -> list[Kernel]:
    """Return the releases of flash attention that are installed, and support this GPU and such heads."""
    if not _installed or device.type != "cuda" or dtype not in _HALF_PRECISION or width % 8:
        return []
    generation, _ = torch.cuda.get_device_capability(device)
    return [
        kernel
        for kernel, release in _installed.items()
        if generation in release.generations and width <= release.max_width
    ]


def cudnn_supports(q_TND: Float[Tensor, "tokens heads width"], rows: Rows) -> bool:
    """Return whether torch's cuDNN attention supports such rows without dropout. They must have equal lengths: for rows
    of different lengths cuDNN would prepare itself for each new number of rows, for tens of milliseconds
    (pytorch#191576). In deterministic mode torch refuses cuDNN, because its backward pass sums in varying order.
    """
    if q_TND.device.type != "cuda" or not rows.is_full:
        return False
    q_RNLD = rows.pad(q_TND).transpose(1, 2)
    given = torch.backends.cuda.SDPAParams(q_RNLD, q_RNLD, q_RNLD, None, 0.0, rows.causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(given)


def cudnn_attention(
    q_TND: Float[Tensor, "tokens heads width"],
    k_TND: Float[Tensor, "tokens shared width"],
    v_TND: Float[Tensor, "tokens shared width"],
    rows: Rows,
) -> Float[Tensor, "tokens heads width"]:
    """Compute cuDNN's attention on rows that it supports (`cudnn_supports`), without dropout, window and mask."""
    k_TND, v_TND = repeat_shared_heads(q_TND, k_TND, v_TND)
    q_RNLD, k_RNLD, v_RNLD = (rows.pad(x).transpose(1, 2) for x in (q_TND, k_TND, v_TND))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        context_RNLD = F.scaled_dot_product_attention(q_RNLD, k_RNLD, v_RNLD, is_causal=rows.causal)
    return rows.unpad(context_RNLD.transpose(1, 2))


_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention kernels that take masks and any shapes. On Hopper GPUs torch's default is cuDNN's: with a mask, its
backward pass may return NaN (pytorch#196678, since torch 2.11), and it prepares itself for each new shape."""


def torch_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute torch's fused attention on rectangles [R, N, L, D] by the kernels of `_NOT_CUDNN`."""
    with sdpa_kernel(_NOT_CUDNN) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, **options)


def switch_flash(kernel: Kernel) -> None:
    """Switch torch's flash attention to the release that `kernel` names, else to the built-in version. If no release is
    installed, nothing happens.

    Raises:
        ImportError, RuntimeError: the release's package does not work on this machine.
    """
    if not _installed:
        return
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    wanted = _installed[kernel].name if kernel in _installed else None
    if wanted == current_flash_attention_impl():
        return
    if wanted is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(wanted)
