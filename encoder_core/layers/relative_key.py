"""Learned relative positions added to the attention scores (Shaw et al., 2018; Huang et al., 2020, methods 1 and 4).

Shapes: T tokens, R rows, N heads, D head width, L longest row, P = 2 L - 1 distances that occur.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.layers.kernels import Heads
from encoder_core.layers.rows import Rows


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
