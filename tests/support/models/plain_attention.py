"""The formulas of attention, row after row, to which kernels are held."""

import torch
from jaxtyping import Float
from torch import Tensor

from encoder_core.layers.attention import Heads, SharedHeads
from encoder_core.layers.deberta_attention import Operands, Relations
from encoder_core.layers.dropout import dropout as drop
from encoder_core.layers.rows import Rows, repeat_shared_heads
from encoder_core.random_draws import draw_key, head_keys


def reference(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute softmax(q k' / sqrt(D)) v over the visible keys, row after row, in the precision of the inputs.
    `key_rows`: keys and values are other tokens, of which a query sees the whole of the same row.
    """
    k_TND, v_TND = repeat_shared_heads(q_TND, k_TND, v_TND)
    contexts, draw = [], draw_key()
    for (start, stop), (first, last) in zip(rows.bounds, (key_rows or rows).bounds, strict=True):
        q_NLD = q_TND[start:stop].transpose(0, 1)
        k_NLD, v_NLD = (x[first:last].transpose(0, 1) for x in (k_TND, v_TND))
        scores_NLL = q_NLD @ k_NLD.transpose(1, 2) / q_NLD.shape[-1] ** 0.5
        at_L = torch.arange(stop - start, device=q_TND.device)
        if window is not None:
            scores_NLL = scores_NLL.masked_fill((at_L[:, None] - at_L).abs() > window, float("-inf"))
        if rows.causal:
            scores_NLL = scores_NLL.masked_fill(at_L > at_L[:, None], float("-inf"))
        drawn_NL = head_keys(rows.random_keys[start:stop], range(len(q_NLD))).t()
        weights_NLL = drop(scores_NLL.softmax(-1), dropout, drawn_NL, draw)
        contexts.append((weights_NLL @ v_NLD).transpose(0, 1))
    return torch.cat(contexts)


def disentangled_reference(
    operands: Operands, relations: Relations, query_rows: Rows, rows: Rows, dropout: float
) -> Float[Tensor, "queries heads width"]:
    """Compute the formula row after row, with a position vector for each pair of tokens."""
    contexts, draw = [], draw_key()
    for row, ((q0, q1), (k0, k1)) in enumerate(zip(query_rows.bounds, rows.bounds, strict=True)):
        index_QK = relations.index[min(row, len(relations.index) - 1), : q1 - q0, : k1 - k0]
        q, k, v = operands.q[q0:q1], operands.k[k0:k1], operands.v[k0:k1]
        scores_NQK = (
            torch.einsum("qnd,knd->nqk", q, k)
            + torch.einsum("qnd,qknd->nqk", q, operands.position_k[index_QK])
            + torch.einsum("qknd,knd->nqk", operands.position_q[index_QK], k)
        )
        if operands.position_scores is not None:
            scores_NQK = scores_NQK + torch.einsum(
                "qknd,qknd->nqk", operands.position_q[index_QK], operands.position_k[index_QK]
            )
        drawn_NQ = head_keys(query_rows.random_keys[q0:q1], range(len(scores_NQK))).t()
        if relations.hidden is not None:
            hidden_QK = relations.hidden[min(row, len(relations.hidden) - 1), : q1 - q0, : k1 - k0]
            scores_NQK = scores_NQK.masked_fill(hidden_QK, float("-inf"))
        weights_NQK = drop((scores_NQK * operands.scale).softmax(-1), dropout, drawn_NQ, draw)
        contexts.append(torch.einsum("nqk,knd->qnd", weights_NQK, v))
    return torch.cat(contexts)
