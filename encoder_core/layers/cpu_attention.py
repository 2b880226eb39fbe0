"""Exact attention on a CPU with dropout or a window, computed without padding for a few heads of one row at a time.

The scores of such a piece stay in the processor's cache from the first product to the last. The forward pass saves only
the dropout mask (a byte per score). The backward pass recomputes the probabilities, as flash attention does (Dao et
al., 2022, section 3.1). Compared with torch's own attention with dropout on a CPU, this is about twice as fast and
takes about an eighth of the memory.

`cpu_relative.py` is for relative positions.

Shapes: T tokens, N heads, D head width; n heads, l queries and m keys of one piece.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.layers.dropout import drop_threshold, keep_mask, kept_scale
from encoder_core.random_draws import draw_key, head_keys

Slices = tuple[slice, slice]  # slices of two dimensions, such as tokens and heads

PIECE_SCORES = 2**18  # largest number of scores of a piece: 1 MiB in fp32, about an L2 cache
BLOCK_QUERIES = 64  # smallest number of queries of a block in local or causal attention

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each row


class BlockedAttention(torch.autograd.Function):
    """(q, k, v: [T, N, D], tokens' random keys: [T], bounds of the rows, dropout, window or None, whether rows
    are causal, bounds of the rows of keys and values or None) -> [T, N, D].

    With a window, a query sees the keys of its row that are at most that many tokens away. Only blocks of scores
    around the diagonal are computed: the cost grows with T * window, not with the square of a row's length. In causal
    rows a query sees no later key, and blocks of scores above the diagonal are skipped.

    With bounds of keys and values this is cross-attention: k, v are [S, N, D], and a query of row i sees their row i.
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
        causal: bool,
        key_bounds: Bounds | None = None,
    ) -> Tensor:
        scores = ScoreDropout.from_rate(drawn_T, dropout)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        keeps = []
        for row, queries, keys, heads in _pieces(bounds, key_bounds, q.shape[1], window, causal=causal):
            hidden = _hidden_keys(queries, keys, window, causal)
            weights = _probabilities(q[queries, heads], k[keys, heads], hidden)
            if scores.threshold:
                keeps.append(scores.mask_of_kept_scores(row, queries, keys, heads))
                weights *= keeps[-1].to(weights.dtype)  # a product of two different dtypes is far slower
            product = torch.bmm(weights, v[keys, heads].transpose(0, 1)).mul_(kept_scale(scores.threshold))
            out[queries, heads] = product.transpose(0, 1)
        ctx.save_for_backward(q, k, v, *keeps)
        ctx.bounds, ctx.threshold, ctx.window, ctx.causal = (bounds, key_bounds), scores.threshold, window, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *keeps = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        inverse, (bounds, key_bounds) = kept_scale(ctx.threshold), ctx.bounds
        pieces = _pieces(bounds, key_bounds, q.shape[1], ctx.window, causal=ctx.causal)
        for i, (_, queries, keys, heads) in enumerate(pieces):
            grad_nlD = grad[queries, heads].transpose(0, 1)
            hidden = _hidden_keys(queries, keys, ctx.window, ctx.causal)
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
            dk[keys, heads] += torch.bmm(d_scores.transpose(1, 2), q[queries, heads].transpose(0, 1)).transpose(0, 1)
        return dq, dk, dv, None, None, None, None, None, None


blocked_attention: Callable[..., Tensor] = BlockedAttention.apply


def _pieces(
    bounds: Bounds, key_bounds: Bounds | None, heads: int, window: int | None, *, causal: bool
) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield pieces: the index of the row's first key, and slices of queries, keys and heads."""
    if key_bounds is None:
        return local_pieces(bounds, heads, window, causal=causal)
    return cross_attention_pieces(bounds, key_bounds, heads)


@dataclass(frozen=True)
class ScoreDropout:
    """Decides which scores dropout keeps, by a hash of the query's random key `drawn_T`, the head, the number `draw` of
    this dropout call, and the key's position in its row."""

    drawn_T: Tensor
    threshold: int
    draw: Tensor

    @classmethod
    def from_rate(cls, drawn_T: Tensor, dropout: float) -> "ScoreDropout":
        """Make the next draw; without dropout, nothing is drawn."""
        threshold = drop_threshold(dropout)
        return cls(drawn_T, threshold, draw_key() if threshold else drawn_T.new_zeros(()))

    def mask_of_kept_scores(self, row: int, queries: slice, keys: slice, heads: slice) -> Tensor:
        """Return [n, l, m] int8, 1 for scores that dropout keeps. `row`: index of the row's first key."""
        drawn_nl = head_keys(self.drawn_T[queries], range(heads.start, heads.stop)).t()
        return keep_mask(drawn_nl, self.draw, range(keys.start - row, keys.stop - row), self.threshold)


def _hidden_keys(queries: slice, keys: slice, window: int | None, causal: bool) -> Tensor | None:
    """Return [l, m] bool, true for keys outside a query's window and, if causal, later keys; None: all are visible."""
    farthest = max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start)
    far, later = window is not None and farthest > window, causal and keys.stop - 1 > queries.start
    if not far and not later:
        return None
    query, key = torch.arange(queries.start, queries.stop), torch.arange(keys.start, keys.stop)
    ahead_lm = query[:, None] - key
    hidden_lm = ahead_lm < 0 if causal else torch.zeros_like(ahead_lm, dtype=torch.bool)
    return hidden_lm if window is None else hidden_lm | (ahead_lm.abs() > window)


def _probabilities(q_lnD: Tensor, k_mnD: Tensor, hidden_lm: Tensor | None) -> Tensor:
    """Return softmax(q k' / sqrt(D)), [n, l, m]."""
    scores_nlm = torch.bmm(q_lnD.transpose(0, 1), k_mnD.permute(1, 2, 0)).mul_(q_lnD.shape[-1] ** -0.5)
    if hidden_lm is not None:
        scores_nlm.masked_fill_(hidden_lm, float("-inf"))
    return softmax(scores_nlm)


def softmax(scores_nlm: Tensor) -> Tensor:
    """Return the softmax in the inputs' dtype; half precision is summed in fp32."""
    if scores_nlm.dtype in (torch.bfloat16, torch.float16):
        return torch.softmax(scores_nlm, -1, dtype=torch.float32).to(scores_nlm.dtype)
    return torch.softmax(scores_nlm, -1)


def local_pieces(
    bounds: Bounds, heads: int, window: int | None, *, causal: bool = False
) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield the pieces of self-attention: the index of the row's first token, and slices of queries, keys and heads.

    A whole row is one piece, for as many heads as fit. If the window is shorter than the row, or rows are causal, a
    piece is a block of queries with the keys that they see.
    """
    for start, stop in bounds:
        reach = stop - start if window is None else window
        whole = stop - start <= reach + 1
        block = max(BLOCK_QUERIES, 0 if whole else reach) if causal or not whole else stop - start
        for first in range(start, stop, block):
            queries = slice(first, min(first + block, stop))
            keys = slice(max(start, first - reach), min(stop, queries.stop + (0 if causal else reach)))
            scores = (queries.stop - first) * (keys.stop - keys.start)
            for together in head_groups(heads, scores):
                yield start, queries, keys, together


def cross_attention_pieces(bounds: Bounds, key_bounds: Bounds, heads: int) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield the pieces of cross-attention: the index of the row's first key, and slices of queries, keys and heads."""
    for (start, stop), (first, last) in zip(bounds, key_bounds, strict=True):
        for together in head_groups(heads, (stop - start) * (last - first)):
            yield first, slice(start, stop), slice(first, last), together


def head_groups(heads: int, scores: int) -> Iterator[slice]:
    """Yield slices of heads, with at most `PIECE_SCORES` scores each or a single head. `scores`: scores per head."""
    together = max(1, min(heads, PIECE_SCORES // scores))
    for head in range(0, heads, together):
        yield slice(head, min(head + together, heads))
