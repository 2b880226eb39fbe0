"""Attention with learned relative-position vectors in scores (Shaw et al., 2018; Huang et al., 2020: methods 1 and 4).

Shapes: T tokens, R rows, L longest row, N heads, D head width, P = 2 L - 1 distances that occur.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.layers.attention import Heads, attend_padded
from encoder_core.layers.gpu_attention import fused_attention, fused_supports
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.rows import Rows


class RelativeKeyAttention(nn.Module):
    """An `AttentionKernel` with a learned vector E[i - j] for each distance from key j to query i.

    scores = (q_i k_j + q_i E[i - j]) / sqrt(D); with `both_sides` the sum also has k_j E[i - j]. Flash attention does
    not support such score terms: on a GPU our own kernels compute them, elsewhere rows are padded.
    """

    def __init__(self, max_length: int, width: int, *, both_sides: bool) -> None:
        super().__init__()
        self.max_length = max_length
        self.both_sides = both_sides
        self.distance = nn.Embedding(2 * max_length - 1, width)

    def forward(
        self, q_TND: Heads, k_TND: Heads, v_TND: Heads, rows: Rows, dropout: float, window: int | None = None
    ) -> Heads:
        if not len(q_TND):
            return q_TND + k_TND + v_TND + 0.0 * self.distance.weight.sum()
        longest = rows.max_length
        table_PD = self.distance.weight[self.max_length - longest : self.max_length + longest - 1]
        takes = fused_supports(q_TND.device.type, q_TND.dtype, q_TND.shape[-1])
        possible: list[Kernel] = [*(("fused",) if takes else ()), "padded", "written"]
        given = (q_TND, k_TND, v_TND, table_PD, rows, dropout, window)
        match pick(possible, dropped=dropout > 0.0):
            case "fused":
                return self.attend_fused(*given)
            case chosen:
                return self.attend_padded_rows(*given, use_torch=chosen != "written")

    def attend_fused(
        self,
        q_TND: Heads,
        k_TND: Heads,
        v_TND: Heads,
        table_PD: Float[Tensor, "distances width"],
        rows: Rows,
        dropout: float,
        window: int | None,
    ) -> Heads:
        """Compute with our GPU kernels. `table_PD`: the table's rows for the distances that occur."""
        table_PND = table_PD[:, None].expand(-1, q_TND.shape[1], -1)
        return fused_attention(
            q_TND,
            k_TND,
            v_TND,
            query_rows=rows,
            rows=rows,
            scale=q_TND.shape[-1] ** -0.5,
            dropout=dropout,
            terms={"table_a": table_PND, "table_b": table_PND if self.both_sides else None},
            window=window,
            center=rows.max_length - 1,
        )

    def attend_padded_rows(
        self,
        q_TND: Heads,
        k_TND: Heads,
        v_TND: Heads,
        table_PD: Float[Tensor, "distances width"],
        rows: Rows,
        dropout: float,
        window: int | None,
        *,
        use_torch: bool = True,
    ) -> Heads:
        """Compute attention on rows padded to a rectangle; the distance terms enter `attend_padded` as a bias."""
        q_RNLD, k_RNLD, v_RNLD = (rows.pad(x).transpose(1, 2) for x in (q_TND, k_TND, v_TND))
        at_L = torch.arange(rows.max_length, device=q_RNLD.device)
        index_LL = at_L[:, None] - at_L + rows.max_length - 1  # for query i and key j the row of `table_PD` for i - j
        bias_RNLL = _gather(q_RNLD @ table_PD.t(), index_LL)
        if self.both_sides:
            bias_RNLL = bias_RNLL + _gather(k_RNLD @ table_PD.t(), index_LL.t()).transpose(-1, -2)
        scale = q_RNLD.shape[-1] ** -0.5
        bias_RNLL = bias_RNLL * scale
        mask = rows.mask_within(window)
        if mask is not None:
            bias_RNLL = bias_RNLL.masked_fill(~mask, float("-inf"))
        context_RNLD = attend_padded(q_RNLD, k_RNLD, v_RNLD, bias_RNLL, rows, dropout, scale=scale, use_torch=use_torch)
        return rows.unpad(context_RNLD.transpose(1, 2))


def _gather(
    scores: Float[Tensor, "rows heads longest distances"], index: Int[Tensor, "longest longest"]
) -> Float[Tensor, "rows heads longest longest"]:
    """Return out[..., i, j] = scores[..., i, index[i, j]]."""
    return scores.gather(-1, index.expand(*scores.shape[:2], *index.shape))
