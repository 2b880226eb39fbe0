"""The ways to compute attention inside rows, all of one signature, `Attend`.

| function       | where                                | how                                              |
|----------------|--------------------------------------|--------------------------------------------------|
| `varlen_flash` | CUDA, bf16 or fp16                   | flash attention over `cu_seqlens`, no padding    |
| `blocked`      | CPU, training with attention dropout | row by row in cache-sized pieces                 |
| `padded_sdpa`  | everything else                      | rows padded to a rectangle, torch's fused kernel |
| `reference`    | tests                                | the formula, row by row                          |

`automatic` picks among the first three. torch's fused CPU kernel has no dropout and falls back to one that
writes out every score three times, which is why `blocked` exists.

Shapes: T tokens, R rows, L longest row, N heads, D head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from encoder_core.layers.blocked import blocked_attention
from encoder_core.layers.rows import Rows

Heads = Float[Tensor, "tokens heads width"]

Attend = Callable[[Tensor, Tensor, Tensor, Rows, float], Tensor]
"""(query, key, value, rows, dropout) -> context: four [T, N, D] tensors; dropout acts on probabilities."""


def automatic(q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
    """The fastest kernel for the tensors at hand. No tokens at all (an idle rank's batch) is no work."""
    if not len(q_TND):
        return q_TND + k_TND + v_TND
    if flash_takes(q_TND.device.type, q_TND.dtype, q_TND.shape[-1]):
        return varlen_flash(q_TND, k_TND, v_TND, rows, dropout)
    if q_TND.device.type == "cpu" and dropout > 0.0:
        return blocked(q_TND, k_TND, v_TND, rows, dropout)
    return padded_sdpa(q_TND, k_TND, v_TND, rows, dropout)


def flash_takes(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether the varlen flash kernel takes these: CUDA, half precision, head width 8, 16, ..., 256."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


def varlen_flash(q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
    """FlashAttention-2 (Dao, 2023) over rows of different lengths.

    This is the operator beneath `torch.nn.attention.varlen.varlen_attn`, called directly because that wrapper
    fixes dropout at 0. The operator carries its own derivative and draws from the CUDA generator.
    """
    context_TND: Tensor = torch.ops.aten._flash_attention_forward(
        q_TND,
        k_TND,
        v_TND,
        rows.cu_seqlens,
        rows.cu_seqlens,
        rows.max_length,
        rows.max_length,
        dropout,
        False,  # is_causal
        False,  # return_debug_mask
    )[0]
    return context_TND


def padded_sdpa(q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
    """torch's fused attention on a padded rectangle; no mask where all rows are equally long."""
    q_RNLD, k_RNLD, v_RNLD = (rows.pad(x).transpose(1, 2) for x in (q_TND, k_TND, v_TND))
    context_RNLD = F.scaled_dot_product_attention(
        q_RNLD, k_RNLD, v_RNLD, attn_mask=rows.mask, dropout_p=dropout
    )
    return rows.unpad(context_RNLD.transpose(1, 2))


def blocked(q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
    """Exact attention in cache-sized pieces without padding, dropout included; see `blocked.py`."""
    context_TND: Tensor = blocked_attention(q_TND, k_TND, v_TND, rows.bounds, dropout)
    return context_TND


def reference(q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
    """softmax(q k' / sqrt(D)) v, one row after the other, in the precision of its inputs."""
    contexts = []
    for start, stop in rows.bounds:
        q_NLD, k_NLD, v_NLD = (x[start:stop].transpose(0, 1) for x in (q_TND, k_TND, v_TND))
        scores_NLL = q_NLD @ k_NLD.transpose(1, 2) / q_NLD.shape[-1] ** 0.5
        weights_NLL = F.dropout(scores_NLL.softmax(-1), dropout)
        contexts.append((weights_NLL @ v_NLD).transpose(0, 1))
    return torch.cat(contexts)
