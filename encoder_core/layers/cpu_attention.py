"""Exact attention on a CPU with dropout, plain and disentangled, a few heads of one row at a time and without padding.

The scores of a piece stay in the processor's cache from the first product to the last. The forward pass keeps
only the dropout mask (a byte per score); the backward pass computes the probabilities again, as flash
attention does (Dao et al., 2022, section 3.1). Against torch's own attention with dropout on a CPU this is
about twice as fast and holds about an eighth of the memory.

Disentangled attention: a term between a content and a relative position depends on the token and on the distance only.
The products of a block of tokens with the vectors of all distances that occur in it are one small matrix product; the
scores are that product read along its diagonals, which a view with other strides does without moving a number:

    product[i, e] = token_i . vector_e,    e = place of the other token - i + block - 1
    scores[i, j]  = product[i, j - i + block - 1]    (strides: one less than a row per i, one per j)

So nothing is gathered, and what a rectangle of padded rows would compute for nothing is not computed. The
probabilities are kept for its backward pass: scores cost twice those of plain attention, too much to make again.

Shapes: T tokens, N heads, D head width, L longest row, E = 2 L - 1 offsets; n heads, l queries and m keys of one piece
(l tokens where both are the row), b tokens of one block, w = l + b - 1 offsets that occur in it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.draws import draw_key, head_keys
from encoder_core.layers.dropout import inverse_rate, kept, threshold_of

PIECE = 2**18  # scores per piece: 1 MiB in fp32, about an L2 cache
BLOCK = 64  # tokens whose products with relative positions, or with the keys of a window, are made together

Bounds = tuple[tuple[int, int], ...]
Slices = tuple[slice, slice]


class BlockedAttention(torch.autograd.Function):
    """(q, k, v: [T, N, D], keys of the tokens' draws: [T], bounds of the rows, dropout, window or None) -> [T, N, D].

    With a window, a query sees the keys of its row that are at most so many tokens away, and only blocks of scores
    around the diagonal are computed: the cost grows with T * window, not with the square of a row's length.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        drawn_T: Tensor,
        bounds: Bounds,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        scores = _Scores.of(drawn_T, dropout)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        keeps = []
        for row, queries, keys, heads in local_pieces(bounds, q.shape[1], window):
            weights = _probabilities(q[queries, heads], k[keys, heads], _hidden(queries, keys, window))
            if scores.threshold:
                keeps.append(scores.kept(row, queries, keys, heads))
                weights *= keeps[-1].to(weights.dtype)  # far quicker than a product of two types
            product = torch.bmm(weights, v[keys, heads].transpose(0, 1)).mul_(inverse_rate(scores.threshold))
            out[queries, heads] = product.transpose(0, 1)
        ctx.save_for_backward(q, k, v, *keeps)
        ctx.bounds, ctx.threshold, ctx.window = bounds, scores.threshold, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *keeps = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        inverse = inverse_rate(ctx.threshold)
        for i, (_, queries, keys, heads) in enumerate(local_pieces(ctx.bounds, q.shape[1], ctx.window)):
            grad_nlD = grad[queries, heads].transpose(0, 1)
            hidden = _hidden(queries, keys, ctx.window)
            weights = _probabilities(q[queries, heads], k[keys, heads], hidden)
            d_weights = torch.bmm(grad_nlD, v[keys, heads].permute(1, 2, 0)).mul_(inverse)
            dropped = weights
            if keeps:
                keep = keeps[i].to(weights.dtype)
                dropped = weights * keep
                d_weights *= keep
            dv[keys, heads] += torch.bmm(dropped.transpose(1, 2), grad_nlD).mul_(inverse).transpose(0, 1)
            row_sum = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(row_sum).mul_(weights).mul_(q.shape[-1] ** -0.5)
            dq[queries, heads] = torch.bmm(d_scores, k[keys, heads].transpose(0, 1)).transpose(0, 1)
            dk[keys, heads] += torch.bmm(
                d_scores.transpose(1, 2), q[queries, heads].transpose(0, 1)
            ).transpose(0, 1)
        return dq, dk, dv, None, None, None, None


blocked_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Bounds, float, int | None], Tensor] = (
    BlockedAttention.apply
)


@dataclass(frozen=True)
class _Scores:
    """Which scores are kept: by the query's token, the head, and the key's position in its row."""

    drawn_T: Tensor
    threshold: int
    draw: Tensor

    @classmethod
    def of(cls, drawn_T: Tensor, dropout: float) -> "_Scores":
        """The next draw; none without dropout."""
        threshold = threshold_of(dropout)
        return cls(drawn_T, threshold, draw_key() if threshold else drawn_T.new_zeros(()))

    def kept(self, row: int, queries: slice, keys: slice, heads: slice) -> Tensor:
        """[n, l, m] int8. `row`: where it begins."""
        drawn_nl = head_keys(self.drawn_T[queries], range(heads.start, heads.stop)).t()
        return kept(drawn_nl, self.draw, range(keys.start - row, keys.stop - row), self.threshold)


def pieces(bounds: Bounds, heads: int) -> Iterator[Slices]:
    """(tokens, heads) slices: each row, with as many heads together as keep within `PIECE` scores."""
    for start, stop in bounds:
        for together in _heads_together(heads, (stop - start) ** 2):
            yield slice(start, stop), together


def local_pieces(bounds: Bounds, heads: int, window: int | None) -> Iterator[tuple[int, slice, slice, slice]]:
    """Where a row begins, and (queries, keys, heads) slices: each row whole, as `pieces`; or, where a window is shorter
    than the row, blocks of its queries with the keys that they reach."""
    for start, stop in bounds:
        reach = stop - start if window is None else window
        block = stop - start if stop - start <= reach + 1 else max(BLOCK, reach)
        for first in range(start, stop, block):
            queries = slice(first, min(first + block, stop))
            keys = slice(max(start, first - reach), min(stop, queries.stop + reach))
            scores = (queries.stop - first) * (keys.stop - keys.start)
            for together in _heads_together(heads, scores):
                yield start, queries, keys, together


def _heads_together(heads: int, scores: int) -> Iterator[slice]:
    """As many heads at a time as keep within `PIECE` scores, of so many a head."""
    together = max(1, min(heads, PIECE // scores))
    for head in range(0, heads, together):
        yield slice(head, min(head + together, heads))


def _hidden(queries: slice, keys: slice, window: int | None) -> Tensor | None:
    """[l, m] bool: keys too far from a query. None where all of them are near."""
    if window is None or max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start) <= window:
        return None
    query, key = torch.arange(queries.start, queries.stop), torch.arange(keys.start, keys.stop)
    return (query[:, None] - key).abs() > window


def _probabilities(q_lnD: Tensor, k_mnD: Tensor, hidden_lm: Tensor | None) -> Tensor:
    """softmax(q k' / sqrt(D)): [n, l, m], in the inputs' dtype, the sums of half precision in fp32."""
    scores_nlm = torch.bmm(q_lnD.transpose(0, 1), k_mnD.permute(1, 2, 0)).mul_(q_lnD.shape[-1] ** -0.5)
    if hidden_lm is not None:
        scores_nlm.masked_fill_(hidden_lm, float("-inf"))
    if scores_nlm.dtype in (torch.bfloat16, torch.float16):
        return torch.softmax(scores_nlm, -1, dtype=torch.float32).to(scores_nlm.dtype)
    return torch.softmax(scores_nlm, -1)


class BlockedDisentangled(torch.autograd.Function):
    """(q, k, v: [T, N, D]; position_k, position_q: [N, E, D]; position_scores: [N, E] or None; keys of the tokens'
    draws: [T]; bounds of the rows, dropout) -> [T, N, D].

    score(i, j) = q_i . k_j + q_i . position_k[j - i + L - 1] + k_j . position_q[i - j + L - 1]
                  + position_scores[j - i + L - 1]:
    each table counts from its own token to the other one, the scores from the query to the key. Scale q, position_q
    and position_scores beforehand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_k: Tensor,
        position_q: Tensor,
        position_scores: Tensor | None,
        drawn_T: Tensor,
        bounds: Bounds,
        dropout: float,
    ) -> Tensor:
        scores = _Scores.of(drawn_T, dropout)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        saved: list[Tensor] = []
        for piece in pieces(bounds, q.shape[1]):
            heads = piece[1]
            between = None if position_scores is None else position_scores[heads]
            weights = _disentangled_probabilities(
                q[piece], k[piece], position_k[heads], position_q[heads], between
            )
            saved.append(weights)
            if scores.threshold:
                saved.append(scores.kept(piece[0].start, piece[0], piece[0], heads))
                weights = weights * saved[-1].to(weights.dtype)
            product = torch.bmm(weights, v[piece].transpose(0, 1)).mul_(inverse_rate(scores.threshold))
            out[piece] = product.transpose(0, 1)
        ctx.save_for_backward(q, k, v, position_k, position_q, *saved)
        ctx.bounds, ctx.threshold, ctx.scored = bounds, scores.threshold, position_scores is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position_k, position_q, *saved = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        d_position_k, d_position_q = torch.zeros_like(position_k), torch.zeros_like(position_q)
        d_scores_NE = position_k.new_zeros(position_k.shape[:2]) if ctx.scored else None
        each = 2 if ctx.threshold else 1
        for i, piece in enumerate(pieces(ctx.bounds, q.shape[1])):
            weights, *keep = saved[i * each : (i + 1) * each]
            heads = piece[1]
            d_scores, dv[piece] = _through_softmax(grad[piece], v[piece], weights, keep, ctx.threshold)
            q_nlD, k_nlD = q[piece].transpose(0, 1), k[piece].transpose(0, 1)
            turned = d_scores.transpose(1, 2).contiguous()
            dq_nlD, dk_nlD = torch.bmm(d_scores, k_nlD), torch.bmm(turned, q_nlD)
            d_between = None if d_scores_NE is None else d_scores_NE[heads]
            _add_gradients(
                d_scores,
                q_nlD,
                table_nED=position_k[heads],
                dx_nlD=dq_nlD,
                d_table_nED=d_position_k[heads],
                d_scores_nE=d_between,
            )
            _add_gradients(turned, k_nlD, position_q[heads], dk_nlD, d_position_q[heads])
            dq[piece], dk[piece] = dq_nlD.transpose(0, 1), dk_nlD.transpose(0, 1)
        return dq, dk, dv, d_position_k, d_position_q, d_scores_NE, None, None, None


blocked_disentangled: Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Bounds, float], Tensor
] = BlockedDisentangled.apply


def _disentangled_probabilities(
    q_lnD: Tensor, k_lnD: Tensor, position_k_nED: Tensor, position_q_nED: Tensor, scores_nE: Tensor | None
) -> Tensor:
    """[n, l, l], in the inputs' dtype, the sums of half precision in fp32."""
    q_nlD, k_nlD = q_lnD.transpose(0, 1), k_lnD.transpose(0, 1)
    scores_nll = torch.bmm(q_nlD, k_nlD.transpose(1, 2))
    _add_scores(scores_nll, q_nlD, position_k_nED, scores_nE)
    _add_scores(scores_nll.transpose(1, 2), k_nlD, position_q_nED)
    if scores_nll.dtype in (torch.bfloat16, torch.float16):
        return torch.softmax(scores_nll, -1, dtype=torch.float32).to(scores_nll.dtype)
    return torch.softmax(scores_nll, -1)


def _add_scores(
    scores_nll: Tensor, x_nlD: Tensor, table_nED: Tensor, scores_nE: Tensor | None = None
) -> None:
    """scores[i, j] += x_i . table[e] + scores[e] with e = j - i + L - 1."""
    for block, window in _blocks(x_nlD.shape[1], table_nED.shape[1]):
        product_nbw = torch.bmm(x_nlD[:, block], table_nED[:, window].transpose(1, 2))
        if scores_nE is not None:
            product_nbw += scores_nE[:, None, window]
        scores_nll[:, block] += _diagonals(product_nbw)


def _add_gradients(
    d_scores_nll: Tensor,
    x_nlD: Tensor,
    table_nED: Tensor,
    dx_nlD: Tensor,
    d_table_nED: Tensor,
    d_scores_nE: Tensor | None = None,
) -> None:
    """The derivatives of `_add_scores` by x, by the table and by the scores, added to what is there."""
    heads, length, _ = x_nlD.shape
    for block, window in _blocks(length, table_nED.shape[1]):
        d_product_nbw = d_scores_nll.new_zeros(heads, block.stop - block.start, window.stop - window.start)
        _diagonals(d_product_nbw).copy_(d_scores_nll[:, block])
        dx_nlD[:, block].baddbmm_(d_product_nbw, table_nED[:, window])
        d_table_nED[:, window].baddbmm_(d_product_nbw.transpose(1, 2), x_nlD[:, block])
        if d_scores_nE is not None:
            d_scores_nE[:, window] += d_product_nbw.sum(1)


def _blocks(length: int, offsets: int) -> Iterator[Slices]:
    """(tokens, rows of the table) slices: a block, and the offsets from its tokens to those of the row."""
    longest = (offsets + 1) // 2
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(longest - stop, longest - 1 + length - start)


def _diagonals(product_nbw: Tensor) -> Tensor:
    """A view [n, b, l] of a contiguous product: element [i, j] is [i, j - i + b - 1]."""
    heads, block, width = product_nbw.shape
    return product_nbw.as_strided(
        (heads, block, width - block + 1),
        (block * width, width - 1, 1),
        product_nbw.storage_offset() + block - 1,
    )


def _through_softmax(
    grad_lnD: Tensor, v_lnD: Tensor, weights_nll: Tensor, keep: list[Tensor], threshold: int
) -> tuple[Tensor, Tensor]:
    """The derivatives by the scores, [n, l, l], and by the values, [l, n, D]."""
    inverse = inverse_rate(threshold)
    grad_nlD = grad_lnD.transpose(0, 1) * inverse
    d_weights = torch.bmm(grad_nlD, v_lnD.permute(1, 2, 0))
    dropped = weights_nll
    if keep:
        keep_nll = keep[0].to(weights_nll.dtype)
        dropped = weights_nll * keep_nll
        d_weights *= keep_nll
    dv_nlD = torch.bmm(dropped.transpose(1, 2), grad_nlD)
    return torch._softmax_backward_data(d_weights, weights_nll, -1, weights_nll.dtype), dv_nlD.transpose(0, 1)
