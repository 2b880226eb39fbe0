"""Multi-head self-attention over flat tokens, and the kernels that compute it inside rows.

Only a kernel knows about rows. All are of one signature, `Attend`:

| function       | where                                | how                                              |
|----------------|--------------------------------------|--------------------------------------------------|
| `varlen_flash` | CUDA, bf16 or fp16                   | flash attention over `cu_seqlens`, no padding    |
| `blocked`      | CPU, training with attention dropout | row by row in cache-sized pieces                 |
| `padded_sdpa`  | everything else                      | rows padded to a rectangle, torch's fused kernel |
| `reference`    | tests                                | the formula, row by row                          |

`automatic` picks among the first three. torch's fused CPU kernel has no dropout and falls back to one that
writes out every score three times, which is why `blocked` exists.

`RelativeKeyAttention` is one, too: learned relative positions added to the scores (Shaw et al., 2018; Huang et al.,
2020, methods 1 and 4).

Shapes: T tokens, R rows, L longest row, H hidden, N heads, D head width (H = N * D), P = 2 L - 1 distances that occur.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.layers.cpu_attention import blocked_attention
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
    """Exact attention in cache-sized pieces without padding, dropout included; see `cpu_attention.py`."""
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


class SelfAttention(nn.Module):
    """Scaled dot-product self-attention with its four projections ("Attention Is All You Need", section 3.2).

    The projections are separate parameters, as in the published models, so that an optimizer with a trust
    ratio per parameter (LAMB) sees the matrices that its authors saw.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, attend: Attend) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attend = attend
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        q_TND, k_TND, v_TND = (
            projection(x_TH).unflatten(-1, (self.heads, -1))
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        context_TND: Tensor = self.attend(q_TND, k_TND, v_TND, rows, dropout)
        output_TH: Tensor = self.output(context_TND.flatten(-2))
        return output_TH


class RelativeKeyAttention(nn.Module):
    """An `Attend` with a vector E[i - j] of its own per distance from key j to query i.

    scores = (q_i k_j + q_i E[i - j]) / sqrt(D), and with `both_sides` also k_j E[i - j] in the sum. The scores
    differ by row and head, which flash kernels cannot take: rows are padded.
    """

    def __init__(self, max_length: int, width: int, *, both_sides: bool) -> None:
        super().__init__()
        self.max_length = max_length
        self.both_sides = both_sides
        self.distance = nn.Embedding(2 * max_length - 1, width)

    def forward(self, q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float) -> Heads:
        if not len(q_TND):
            return q_TND + k_TND + v_TND + 0.0 * self.distance.weight.sum()
        q_RNLD, k_RNLD, v_RNLD = (rows.pad(x).transpose(1, 2) for x in (q_TND, k_TND, v_TND))
        longest = rows.max_length
        table_PD = self.distance.weight[self.max_length - longest : self.max_length + longest - 1]
        index_LL = self._places(longest, q_RNLD.device)
        bias_RNLL = _gather(q_RNLD @ table_PD.t(), index_LL)
        if self.both_sides:
            bias_RNLL = bias_RNLL + _gather(k_RNLD @ table_PD.t(), index_LL.t()).transpose(-1, -2)
        bias_RNLL = bias_RNLL * q_RNLD.shape[-1] ** -0.5
        if rows.mask is not None:
            bias_RNLL = bias_RNLL.masked_fill(~rows.mask, float("-inf"))
        context_RNLD = F.scaled_dot_product_attention(
            q_RNLD, k_RNLD, v_RNLD, attn_mask=bias_RNLL, dropout_p=dropout
        )
        return rows.unpad(context_RNLD.transpose(1, 2))

    @staticmethod
    def _places(longest: int, device: torch.device) -> Int[Tensor, "longest longest"]:
        """Row of the table in use for query i and key j: i - j, counted from the most negative distance."""
        place = torch.arange(longest, device=device)
        return place[:, None] - place + longest - 1


def _gather(
    scores: Float[Tensor, "rows heads longest distances"], index: Int[Tensor, "longest longest"]
) -> Float[Tensor, "rows heads longest longest"]:
    """out[..., i, j] = scores[..., i, index[i, j]]."""
    return scores.gather(-1, index.expand(*scores.shape[:2], *index.shape))
