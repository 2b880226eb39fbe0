"""The fused attention's backward kernels by queries and by keys, which recompute scores and dropout.

With P the probabilities before dropout and dP their gradients: dS = P * (dP - delta) * scale, where delta is the sum
of a query's context times its gradient (Dao et al., 2022, appendix B.4). Every sum has a fixed order: results have
the same bits each time.
"""

import triton
import triton.language as tl

from encoder_core.kernels.forward import keys_in_reach
from encoder_core.kernels.tile import (
    by_distance,
    by_distance_of_keys,
    carried_tiles,
    find_keys,
    find_queries,
    in_other_segment,
    kept,
    key_bounds,
    load_band,
    load_vectors,
    product,
    row_bounds,
    scores_of,
    sign_of,
    store_vectors,
)


@triton.jit
def load_queries(x, tile: tl.constexpr, grad, log_sums, head, q_at, q_here):
    """Load q, r, the context's gradients, and log2 of sums."""
    q = load_vectors(x, tile, x.q, head, q_at, q_here)
    r = q
    if x.r is not None:
        r = load_vectors(x, tile, x.r, head, q_at, q_here)
    grads = load_vectors(x, tile, grad, head, q_at, q_here)
    log_sum = tl.load(log_sums + q_at * x.heads + head, mask=q_here, other=float("inf"))
    return q, r, grads, log_sum


@triton.jit
def make_deltas(x, tile: tl.constexpr, context, grads, deltas, head, q_at, q_here):
    """Compute, store and return the deltas of queries."""
    contexts = load_vectors(x, tile, context, head, q_at, q_here)
    delta = tl.sum(grads.to(tile.sums) * contexts.to(tile.sums), 1)
    tl.store(deltas + q_at * x.heads + head, delta, mask=q_here)
    return delta


@triton.jit
def load_deltas(x, deltas, head, q_at, q_here):
    return tl.load(deltas + q_at * x.heads + head, mask=q_here, other=0.0)


@triton.jit
def through_softmax(
    x,
    tile: tl.constexpr,
    head,
    sign,
    q,
    r,
    k,
    v,
    grads,
    log_sum,
    delta,
    q_first,
    q_at,
    q_here,
    k_first,
    k_at,
    k_here,
):
    """Return the probabilities after dropout, and the gradients by the unscaled scores, [S, S] each."""
    scores = scores_of(x, tile, head, sign, q, r, k, q_first, q_at, q_here, k_first, k_at, k_here)
    weights = tl.exp2(scores - log_sum[:, None])
    d_weights = product(grads, tl.trans(v))
    dropped = weights
    if x.draws is not None:
        keep = kept(x, tile, head, q_at, q_here, k_first)
        dropped = tl.where(keep, weights * x.inverse, 0.0)
        d_weights = tl.where(keep, d_weights * x.inverse, 0.0)
    return dropped, weights * (d_weights - delta[:, None]) * x.scale


@triton.jit
def queries_kernel(x, grad, context, log_sums, deltas, d_q, d_r, d_segments, tiles, tile: tl.constexpr):
    """Compute gradients by q, r and segment scores of a tile of queries, and the deltas [M, N]. Grid (R * tiles, N)."""
    row, head = tl.program_id(0) // tiles, tl.program_id(1)
    q_first = tl.program_id(0) % tiles * tile.size
    start, length = row_bounds(x, row)
    if q_first >= length:
        return
    sign = sign_of(x, row)
    q_at, q_here = find_queries(x, tile, start, length, q_first)
    q, r, grads, log_sum = load_queries(x, tile, grad, log_sums, head, q_at, q_here)
    delta = make_deltas(x, tile, context, grads, deltas, head, q_at, q_here)
    dq = tl.full([tile.size, tile.padded], 0.0, tile.sums)
    dr = tl.full([tile.size, tile.padded], 0.0, tile.sums)
    d_same, d_other = tl.full([tile.size], 0.0, tile.sums), tl.full([tile.size], 0.0, tile.sums)
    k_start, k_length = key_bounds(x, row, start, length)
    low, high = keys_in_reach(x, tile, k_length, q_first)
    for k_first in range(low, high, tile.size):
        k_at, k_here = find_keys(x, tile, row, k_start, k_length, k_first)
        k = load_vectors(x, tile, x.k, head, k_at, k_here)
        v = load_vectors(x, tile, x.v, head, k_at, k_here)
        _, d_scores = through_softmax(
            x,
            tile,
            head,
            sign,
            q,
            r,
            k,
            v,
            grads,
            log_sum,
            delta,
            q_first,
            q_at,
            q_here,
            k_first,
            k_at,
            k_here,
        )
        dq += product(d_scores.to(k.dtype), k)
        if x.table_a is not None:
            lower, upper = by_distance(tile, sign, d_scores, k_first)
            by_a = product(lower.to(q.dtype), load_band(x, tile, x.table_a, head, sign, q_first, k_first, 0))
            by_a += product(upper.to(q.dtype), load_band(x, tile, x.table_a, head, sign, q_first, k_first, 1))
            if x.r is None:
                dq += by_a
            else:
                dr += by_a
        if x.segment_scores is not None:
            apart = in_other_segment(x, q_at, q_here, k_at, k_here)
            d_other += tl.sum(tl.where(apart, d_scores, 0.0), 1)
            d_same += tl.sum(tl.where(apart, 0.0, d_scores), 1)
    store_vectors(x, tile, d_q, head, q_at, q_here, dq)
    if x.r is not None:
        store_vectors(x, tile, d_r, head, q_at, q_here, dr)
    if x.segment_scores is not None:
        place = d_segments + (q_at * x.heads + head) * 2
        tl.store(place, d_same.to(d_segments.dtype.element_ty), mask=q_here)
        tl.store(place + 1, d_other.to(d_segments.dtype.element_ty), mask=q_here)


@triton.jit
def queries_in_reach(x, tile: tl.constexpr, length, k_first):
    """Return the start of the first tile of queries that may see the tile of keys, and the end of the last."""
    low, high = 0, length
    if x.window is not None:
        low = tl.maximum(k_first - x.window, 0) // tile.size * tile.size
        high = tl.minimum(length, k_first + tile.size + x.window)
    if x.causal is not None:
        low = tl.maximum(low, k_first)
    return low, high


@triton.jit
def keys_kernel(x, grad, log_sums, deltas, d_k, d_v, tiles, tile: tl.constexpr):
    """Compute gradients by keys and values, one tile of keys a program. Grid (R * tiles, N)."""
    row, head = tl.program_id(0) // tiles, tl.program_id(1)
    k_first = (tl.program_id(0) % tiles - carried_tiles(x, tile)) * tile.size
    start, length = row_bounds(x, row)
    k_start, k_length = key_bounds(x, row, start, length)
    if k_first >= k_length:
        return
    sign = sign_of(x, row)
    k_at, k_here = find_keys(x, tile, row, k_start, k_length, k_first)
    k = load_vectors(x, tile, x.k, head, k_at, k_here)
    v = load_vectors(x, tile, x.v, head, k_at, k_here)
    dk = tl.full([tile.size, tile.padded], 0.0, tile.sums)
    dv = tl.full([tile.size, tile.padded], 0.0, tile.sums)
    low, high = queries_in_reach(x, tile, length, k_first)
    for q_first in range(low, high, tile.size):
        q_at, q_here = find_queries(x, tile, start, length, q_first)
        q, r, grads, log_sum = load_queries(x, tile, grad, log_sums, head, q_at, q_here)
        delta = load_deltas(x, deltas, head, q_at, q_here)
        dropped, d_scores = through_softmax(
            x,
            tile,
            head,
            sign,
            q,
            r,
            k,
            v,
            grads,
            log_sum,
            delta,
            q_first,
            q_at,
            q_here,
            k_first,
            k_at,
            k_here,
        )
        dv += product(tl.trans(dropped.to(grads.dtype)), grads)
        dk += product(tl.trans(d_scores.to(q.dtype)), q)
        if x.table_b is not None:
            lower, upper = by_distance_of_keys(tile, sign, d_scores, q_first)
            band = load_band(x, tile, x.table_b, head, sign, q_first, k_first, 0)
            dk += product(tl.trans(lower.to(band.dtype)), band)
            band = load_band(x, tile, x.table_b, head, sign, q_first, k_first, 1)
            dk += product(tl.trans(upper.to(band.dtype)), band)
    store_vectors(x, tile, d_k, head, k_at, k_here, dk)
    store_vectors(x, tile, d_v, head, k_at, k_here, dv)
