"""Exact attention with relative positions on a CPU: DeBERTa's (disentangled) and XLNet's.

It computes a few heads of one row at a time, without padding. The score of a content with a relative position depends
only on the token and the distance. So a block of tokens is multiplied with the vectors of all distances that occur, in
one small matrix product, and the scores are read along the product's diagonals, by a view with other strides that
copies nothing:

    product[i, e] = token_i . vector_e,    e = index of the other token - i + block - 1
    scores[i, j]  = product[i, j - i + block - 1]    (strides: one less than a row per i, one per j)

So nothing is gathered. Only if a row's queries are not all of its tokens, as in XLNet's query stream, the product is
read by index. The probabilities are saved for the backward pass: scores cost twice those of plain attention, too much
to recompute.

Shapes: M queries, K keys, N heads, D head width (that of values; queries and keys may be wider), E offsets; n heads,
m queries and k keys of one piece (or l tokens, o others); b tokens of one block, w offsets that occur in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.layers.cpu_attention import ScoreDropout, Slices, head_groups, softmax
from encoder_core.layers.dropout import kept_scale
from encoder_core.layers.torch_internals import softmax_backward

HIDDEN_KEY_SCORE = -1e30  # score of a hidden key, whose probability is then 0
BLOCK_TOKENS = 128  # number of tokens of a block, which is multiplied with relative positions at once


@dataclass(frozen=True)
class RelativeRow:
    """The queries and keys of one row, and their offsets, that is, rows of the table of distances.

    Attributes:
        queries, keys: the row's slices of all flat queries and keys.
        origin: offset of the first key from a query at position 0; that of key j from a query at i is j - i + origin.
        at: [m] int64, positions of the queries; None: 0, 1, 2 and so on.
        hidden: [m, k], 0 where a query sees a key and `HIDDEN_KEY_SCORE` elsewhere; None: all keys are visible.
    """

    queries: slice
    keys: slice
    origin: int
    at: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def score_count(self) -> int:
        """Number of scores of one head: queries times keys."""
        return int((self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start))


class BlockedRelativeAttention(torch.autograd.Function):
    """(q: [M, N, D'], k: [K, N, D'], v: [K, N, D]; r: [M, N, D], table_r: [N, E, D]; table_k: [N, E, D] or None, then
    D' is D; table_c: [N, E] or None; queries' random keys: [M]; rows, dropout) -> [M, N, D].

    score(i, j) = q_i . k_j + r_i . table_r[j - i + origin] + k_j . table_k[i - j + origin] + table_c[j - i + origin]

    A table's offset counts from the token that is multiplied with it to the other token. The caller must scale q, r,
    table_k and table_c. A query that sees no key gets the mean of all values, which the caller must discard.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        table_r: Tensor,
        table_k: Tensor | None,
        table_c: Tensor | None,
        drawn_M: Tensor,
        rows: Sequence[RelativeRow],
        dropout: float,
    ) -> Tensor:
        draws = ScoreDropout.from_rate(drawn_M, dropout)
        out = v.new_empty(r.shape)
        saved: list[Tensor] = []
        for row, heads, queries, keys in _pieces(rows, r.shape[1]):
            scores = _content_scores(q[queries], k[keys], row.hidden)
            _add_scores(scores, r[queries], table_r[heads], row, None if table_c is None else table_c[heads])
            if table_k is not None:
                _add_scores(scores.transpose(1, 2), k[keys], table_k[heads], row)
            weights = softmax(scores)
            saved.append(weights)
            if draws.threshold:
                saved.append(draws.mask_of_kept_scores(row.keys.start, row.queries, row.keys, heads))
                weights = weights * saved[-1].to(weights.dtype)
            product = torch.bmm(weights, v[keys].transpose(0, 1)).mul_(kept_scale(draws.threshold))
            out[queries] = product.transpose(0, 1)
        ctx.save_for_backward(q, k, v, r, table_r, table_k, *saved)
        ctx.rows, ctx.threshold, ctx.scored = rows, draws.threshold, table_c is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, r, table_r, table_k, *saved = ctx.saved_tensors
        dq, dr = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, r))
        # Initialised to zero, because the gradients of keys in a row without queries are never written.
        dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        d_table_r = torch.zeros_like(table_r)
        d_table_k = None if table_k is None else torch.zeros_like(table_k)
        d_table_c = table_r.new_zeros(table_r.shape[:2]) if ctx.scored else None
        each = 2 if ctx.threshold else 1
        for i, (row, heads, queries, keys) in enumerate(_pieces(ctx.rows, r.shape[1])):
            weights, *keep = saved[i * each : (i + 1) * each]
            d_scores, dv[keys] = _softmax_gradients(grad[queries], v[keys], weights, keep, ctx.threshold)
            dq[queries] = torch.bmm(d_scores, k[keys].transpose(0, 1)).transpose(0, 1)
            d_c = None if d_table_c is None else d_table_c[heads]
            dr[queries] = _add_gradients(d_scores, r[queries], table_r[heads], d_table_r[heads], row, d_c)
            turned = d_scores.transpose(1, 2)
            dk_nkD = torch.bmm(turned, q[queries].transpose(0, 1))
            if table_k is not None and d_table_k is not None:
                dk_nkD += _add_gradients(turned, k[keys], table_k[heads], d_table_k[heads], row).transpose(0, 1)
            dk[keys] = dk_nkD.transpose(0, 1)
        return dq, dk, dv, dr, d_table_r, d_table_k, d_table_c, None, None, None


blocked_relative_attention: Callable[..., Tensor] = BlockedRelativeAttention.apply


def _pieces(rows: Sequence[RelativeRow], heads: int) -> Iterator[tuple[RelativeRow, slice, Slices, Slices]]:
    """Yield pieces: a row, a slice of heads, and the indices of the row's queries and keys for these heads."""
    for row in rows:
        if row.score_count:
            for together in head_groups(heads, row.score_count):
                yield row, together, (row.queries, together), (row.keys, together)


def _content_scores(q_mnD: Tensor, k_knD: Tensor, hidden_mk: Tensor | None) -> Tensor:
    """Return [n, m, k], queries times keys, plus `hidden_mk`."""
    q_nmD, k_nDk = q_mnD.transpose(0, 1), k_knD.permute(1, 2, 0)
    if hidden_mk is None:
        return torch.bmm(q_nmD, k_nDk)
    return torch.baddbmm(hidden_mk[None], q_nmD, k_nDk)


def _add_scores(
    scores_nlo: Tensor, x_lnD: Tensor, table_nED: Tensor, row: RelativeRow, table_nE: Tensor | None = None
) -> None:
    """Add x_i . table_nED[e] + table_nE[e], with e = j - i + origin, to scores_nlo[i, j]."""
    x_nlD, others = x_lnD.transpose(0, 1), scores_nlo.shape[2]
    if row.at is not None:
        product_nlE = torch.bmm(x_nlD, table_nED.transpose(1, 2))
        if table_nE is not None:
            product_nlE += table_nE[:, None]
        scores_nlo += product_nlE.gather(-1, _offsets(row.at, row, scores_nlo))
        return
    for block, window in _blocks(x_nlD.shape[1], others, row.origin):
        product_nbw = torch.bmm(x_nlD[:, block], table_nED[:, window].transpose(1, 2))
        if table_nE is not None:
            product_nbw += table_nE[:, None, window]
        scores_nlo[:, block] += _diagonals(product_nbw)


def _add_gradients(
    d_scores_nlo: Tensor,
    x_lnD: Tensor,
    table_nED: Tensor,
    d_table_nED: Tensor,
    row: RelativeRow,
    d_table_nE: Tensor | None = None,
) -> Tensor:
    """Return the gradient of x in `_add_scores`, [l, n, D]; add the gradients of the tables to `d_table_nED` and
    `d_table_nE`.
    """
    x_nlD = x_lnD.transpose(0, 1)
    if row.at is not None:
        d_product_nlE = d_scores_nlo.new_zeros(*d_scores_nlo.shape[:2], table_nED.shape[1])
        d_product_nlE.scatter_(-1, _offsets(row.at, row, d_scores_nlo), d_scores_nlo)
        d_table_nED.baddbmm_(d_product_nlE.transpose(1, 2), x_nlD)
        if d_table_nE is not None:
            d_table_nE += d_product_nlE.sum(1)
        return torch.bmm(d_product_nlE, table_nED).transpose(0, 1)
    dx_nlD = torch.empty_like(x_nlD, memory_format=torch.contiguous_format)
    d_product_nbw = d_scores_nlo.new_empty(0)
    for block, window in _blocks(x_nlD.shape[1], d_scores_nlo.shape[2], row.origin):
        shape = (len(d_scores_nlo), block.stop - block.start, window.stop - window.start)
        if d_product_nbw.shape != shape:  # else reused: elements off the diagonals are still zero
            d_product_nbw = d_scores_nlo.new_zeros(shape)
        _diagonals(d_product_nbw).copy_(d_scores_nlo[:, block])
        torch.bmm(d_product_nbw, table_nED[:, window], out=dx_nlD[:, block])
        d_table_nED[:, window].baddbmm_(d_product_nbw.transpose(1, 2), x_nlD[:, block])
        if d_table_nE is not None:
            d_table_nE[:, window] += d_product_nbw.sum(1)
    return dx_nlD.transpose(0, 1)


def _offsets(at_m: Tensor, row: RelativeRow, scores_nmk: Tensor) -> Tensor:
    """Return [n, m, k] int64, the offset (table row) of each key from queries at positions `at_m`."""
    keys_k = torch.arange(scores_nmk.shape[2], device=at_m.device)
    return (keys_k - at_m[:, None] + row.origin).expand(scores_nmk.shape)


def _blocks(length: int, other_count: int, origin: int) -> Iterator[Slices]:
    """Yield blocks: a slice of tokens, and the slice of table rows with the offsets of all other tokens from them."""
    for start in range(0, length, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, length)
        yield slice(start, stop), slice(origin - stop + 1, origin + other_count - start)


def _diagonals(product_nbw: Tensor) -> Tensor:
    """Return a view [n, b, o] of a contiguous product: view[i, j] is product[i, j - i + b - 1]."""
    heads, block, width = product_nbw.shape
    return product_nbw.as_strided(
        (heads, block, width - block + 1),
        (block * width, width - 1, 1),
        product_nbw.storage_offset() + block - 1,
    )


def _softmax_gradients(
    grad_mnD: Tensor, v_knD: Tensor, weights_nmk: Tensor, keep: list[Tensor], threshold: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores, [n, m, k], and of the values, [k, n, D]."""
    grad_nmD = grad_mnD.transpose(0, 1) * kept_scale(threshold)
    d_weights = torch.bmm(grad_nmD, v_knD.permute(1, 2, 0))
    dropped = weights_nmk
    if keep:
        keep_nmk = keep[0].to(weights_nmk.dtype)
        dropped = weights_nmk * keep_nmk
        d_weights *= keep_nmk
    dv_nkD = torch.bmm(dropped.transpose(1, 2), grad_nmD)
    return softmax_backward(d_weights, weights_nmk), dv_nkD.transpose(0, 1)
