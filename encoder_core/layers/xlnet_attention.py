"""XLNet's attention (Yang et al. 2019): relative positions, relative segments, and two streams over one memory.

The content stream h sees the token at its own position; the query stream g sees only the position. Both attend to the
same keys: the memory and the content states of their row.

    score(i, j) = ((q_i + b_w) . k_j  +  (q_i + b_r) . r_{i-j}  +  (q_i + b_s) . s_{same or other segment}) / sqrt(D)

b_w, b_r and b_s are learned biases, r_d the projected sinusoid of distance d, s a learned vector for each case.
The content stream sees tokens that are not later in the factorisation order, the query stream only earlier ones.

Shapes: T tokens, M targets, H hidden, N heads, D head width; R rows, L longest row, C memory tokens, K = C + L keys,
Q queries of a row, P distances.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.layers.attention import attend_padded
from encoder_core.layers.cpu_relative import blocked_relative_attention
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.gpu_attention import fused_attention, fused_supports
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.parameters import AttentionBias, IntoHeads, OutOfHeads, Weights
from encoder_core.layers.residual import LayerNorm
from encoder_core.layers.xlnet_scope import AttentionScope


class TwoStreamAttention(nn.Module):
    """XLNet's attention with its projections, biases and residual LayerNorm, which both streams share."""

    def __init__(self, hidden: int, heads: int, *, eps: float, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        width = hidden // heads
        self.query, self.key, self.value, self.distance = (IntoHeads(hidden, heads) for _ in range(4))
        self.output = OutOfHeads(hidden, heads)
        self.content_bias, self.distance_bias, self.segment_bias = (AttentionBias(heads, width) for _ in range(3))
        self.segment = Weights(2, heads, width)
        self.norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)
        self.attention_dropout = attention_dropout

    def project_keys_and_values(self, content_RKH: Float[Tensor, "rows keys hidden"]) -> tuple[Tensor, Tensor]:
        """Return keys and values, [R, N, K, D] each, of the memory and the content states, in padded rows."""
        return self.key(content_RKH).transpose(1, 2), self.value(content_RKH).transpose(1, 2)

    def forward(
        self,
        x_MH: Float[Tensor, "queries hidden"],
        keys: tuple[Tensor, Tensor],
        distances_NPD: Float[Tensor, "heads distances width"],
        scope: AttentionScope,
    ) -> Float[Tensor, "queries heads width"]:
        """Return the attention kernel's context for the states of one stream."""
        query_MND: Tensor = self.query(x_MH)
        takes = fused_supports(query_MND.device.type, query_MND.dtype, query_MND.shape[-1])
        possible: list[Kernel] = ["padded", "written"]
        if scope.tokens.positions.numel():
            if query_MND.device.type == "cpu":
                possible.insert(0, "blocked")
            if takes:
                possible.insert(0, "fused")
        match pick(possible, dropped=self.training and self.attention_dropout > 0.0):
            case "fused":
                return self.attend_fused(query_MND, keys, distances_NPD, scope)
            case "blocked":
                return self.attend_blocked(query_MND, keys, distances_NPD, scope)
            case chosen:
                return self.attend_padded_rows(query_MND, keys, distances_NPD, scope, use_torch=chosen != "written")

    def attend_fused(
        self, query_MND: Tensor, keys: tuple[Tensor, Tensor], distances_NPD: Tensor, scope: AttentionScope
    ) -> Float[Tensor, "queries heads width"]:
        """Compute attention on a GPU, without scores in memory; see `encoder_core/kernels`.

        Parameters are used in the same order as in `attend_padded_rows`, which idle ranks run, because at ZeRO 3 all
        ranks must gather them in one order.
        """
        key_KND, value_KND = (scope.flat_keys(x.transpose(1, 2)) for x in keys)
        content_MND, distance_MND = self.content_bias(query_MND), self.distance_bias(query_MND)
        segment_scores = None
        if scope.batch.segments is not None:
            segment_scores = torch.einsum("mnd,snd->mns", self.segment_bias(query_MND), self.segment())
        return fused_attention(
            content_MND,
            key_KND,
            value_KND,
            query_rows=scope.rows,
            rows=scope.tokens,
            scale=key_KND.shape[-1] ** -0.5,
            dropout=self.attention_dropout if self.training else 0.0,
            terms={
                "r": distance_MND,
                "table_a": distances_NPD.transpose(0, 1),
                "segment_scores": segment_scores,
            },
            **scope.kernel_layout,
        )

    def attend_blocked(
        self, query_MND: Tensor, keys: tuple[Tensor, Tensor], distances_NPD: Tensor, scope: AttentionScope
    ) -> Float[Tensor, "queries heads width"]:
        """Compute attention on a CPU row by row, in cache-sized pieces. A query that sees no key gets zeros.

        Parameters are used in the same order as in `attend_padded_rows`; see `attend_fused`.
        """
        key_KND, value_KND = (scope.flat_keys(x.transpose(1, 2)) for x in keys)
        scale = key_KND.shape[-1] ** -0.5
        content_MND, distance_MND = self.content_bias(query_MND) * scale, self.distance_bias(query_MND) * scale
        if scope.batch.segments is not None:
            content_MND, key_KND = self._add_segment_columns(query_MND, content_MND, key_KND, scope, scale)
        table_NED = distances_NPD.flip(1)  # by distance from query to key, the negative of that from key to query
        if scope.batch.reversed_rows is not None:
            table_NED = torch.cat([table_NED, distances_NPD], dim=1)
        context_MND = blocked_relative_attention(
            content_MND,
            key_KND,
            value_KND,
            distance_MND,
            table_NED,
            None,
            None,
            scope.rows.random_keys,
            scope.relative_rows(query_MND.dtype),
            self.attention_dropout if self.training else 0.0,
        )
        blind_M = scope.blind_queries
        return context_MND if blind_M is None else context_MND.masked_fill(blind_M[:, None, None], 0.0)

    def _add_segment_columns(
        self, query_MND: Tensor, content_MND: Tensor, key_KND: Tensor, scope: AttentionScope, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys with extra columns, whose product adds the segment scores.

        For equal segments it adds the query's score for its own segment minus that for another segment, else 0. The
        omitted score for another segment would be the same for all keys of a query, so probabilities do not change.
        """
        scores_MNS = torch.einsum("mnd,snd->mns", self.segment_bias(query_MND), self.segment())
        own_MN1 = (scores_MNS[..., :1] - scores_MNS[..., 1:]) * scale
        segments_M1S, segments_K1S = (x[:, None].to(query_MND.dtype) for x in scope.one_hot_segments)
        wider_KNS = segments_K1S.expand(-1, key_KND.shape[1], -1)
        return torch.cat([content_MND, own_MN1 * segments_M1S], dim=-1), torch.cat([key_KND, wider_KNS], dim=-1)

    def attend_padded_rows(
        self,
        query_MND: Tensor,
        keys: tuple[Tensor, Tensor],
        distances_NPD: Tensor,
        scope: AttentionScope,
        *,
        use_torch: bool = True,
    ) -> Float[Tensor, "queries heads width"]:
        """Compute attention on rows padded to a rectangle. The position and segment terms enter `attend_padded` as a
        bias. A query that sees no key gets zeros.
        """
        key_RNKD, value_RNKD = keys
        scale = key_RNKD.shape[-1] ** -0.5
        shape = (len(key_RNKD), key_RNKD.shape[1], scope.distance_index.shape[1], key_RNKD.shape[2])
        to_content_RNQD = self._pad_queries(self.content_bias(query_MND), scope)
        to_distance_RNQD = self._pad_queries(self.distance_bias(query_MND), scope)
        scores_RNQP = to_distance_RNQD @ distances_NPD.transpose(1, 2)
        bias_RNQK = scores_RNQP.gather(-1, scope.distance_index[:, None].expand(shape))
        if scope.in_other_segment is not None:
            to_segment_RNQD = self._pad_queries(self.segment_bias(query_MND), scope)
            same, other = torch.einsum("rnqd,snd->srnq", to_segment_RNQD, self.segment()).unsqueeze(-1)
            bias_RNQK = bias_RNQK + torch.where(scope.in_other_segment[:, None], other, same)
        blind = ~scope.visible.any(-1, keepdim=True)[:, None]
        hidden = ~(scope.visible[:, None] | blind)
        context_RNQD = attend_padded(
            to_content_RNQD,
            key_RNKD,
            value_RNKD,
            (bias_RNQK * scale).masked_fill(hidden, float("-inf")),
            scope.rows,
            self.attention_dropout if self.training else 0.0,
            scale=scale,
            use_torch=use_torch,
        )
        return scope.rows.unpad(context_RNQD.masked_fill(blind, 0.0).transpose(1, 2))

    @staticmethod
    def _pad_queries(x_MND: Tensor, scope: AttentionScope) -> Float[Tensor, "rows heads queries width"]:
        return scope.rows.pad(x_MND).transpose(1, 2)


def sinusoids(first: int, last: int, hidden: int, device: torch.device) -> Float[Tensor, "distances hidden"]:
    """Return [last - first + 1, H] fp32: sines, then cosines, for each distance first .. last (Dai et al. 2019)."""
    exponents = torch.arange(0, hidden, 2, device=device).float() / hidden
    angles = torch.arange(first, last + 1, device=device).float()[:, None] * (1 / torch.pow(10_000, exponents))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
