"""The fused attention's backward kernels: `queries_kernel` and `keys_kernel`. Both recompute scores and dropout.

With P the probabilities before dropout and dP their gradients, the unscaled scores have the gradients dS = P * (dP -
delta) * scale, where delta is the sum of a query's context times its gradient (Dao et al., 2022, appendix B.4). Every
sum has a fixed order, so results have the same bits each time. Names and arguments: `operands.py` and `tile.py`.

Each pair of tiles uses a band of table rows (`tile.py`), and the bands of neighbouring pairs overlap by half. Gradients
for a half band are held back until both pairs that use it are computed. So a half band costs only one product for the
table's gradients, and one for the gradients of the queries or keys.
"""

import triton
import triton.language as tl

from encoder_core.kernels.forward import keys_in_reach
from encoder_core.kernels.tile import (
    add_vectors,
    find_keys,
    find_queries,
    gather_by_distance,
    gather_by_key_distance,
    in_other_segment,
    in_upper_half,
    keep_mask,
    key_bounds,
    load_band,
    load_vectors,
    matrix_product,
    memory_tile_count,
    row_bounds,
    row_sign,
    store_vectors,
    tile_scores,
)


@triton.jit
def load_queries(x, tile: tl.constexpr, grad, log_sums, head, q_at, q_here):
    """Load the tile's q, r, gradients of the context, and log2 of the sums of exponentials."""
    q = load_vectors(x, tile, x.q, head, q_at, q_here)
    r = q
    if x.r is not None:
        r = load_vectors(x, tile, x.r, head, q_at, q_here)
    grads = load_vectors(x, tile, grad, head, q_at, q_here)
    log_sum = tl.load(log_sums + q_at * x.heads + head, mask=q_here, other=float("inf"))
    return q, r, grads, log_sum


@triton.jit
def compute_deltas(x, tile: tl.constexpr, context, grads, deltas, head, q_at, q_here):
    """Compute, store and return [S] deltas: the sum of each query's context times its gradient."""
    contexts = load_vectors(x, tile, context, head, q_at, q_here)
    delta = tl.sum(grads.to(tile.sums) * contexts.to(tile.sums), 1)
    tl.store(deltas + q_at * x.heads + head, delta, mask=q_here)
    return delta


@triton.jit
def load_deltas(x, deltas, head, q_at, q_here):
    return tl.load(deltas + q_at * x.heads + head, mask=q_here, other=0.0)


@triton.jit
def softmax_gradients(
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
    """Return [S, S] probabilities after dropout, and [S, S] gradients with respect to the unscaled scores."""
    scores = tile_scores(x, tile, head, sign, q, r, k, q_first, q_at, q_here, k_first, k_at, k_here)
    weights = tl.exp2(scores - log_sum[:, None])
    d_weights = matrix_product(grads, tl.trans(v))
    dropped = weights
    if x.draws is not None:
        keep = keep_mask(x, tile, head, q_at, q_here, k_first)
        dropped = tl.where(keep, weights * x.inverse, 0.0)
        d_weights = tl.where(keep, d_weights * x.inverse, 0.0)
    return dropped, weights * (d_weights - delta[:, None]) * x.scale


@triton.jit
def table_sum_rows(tile: tl.constexpr, sums, sign, q_first, k_first, half):
    """Return [S] int64, the program's rows in `TableSums` for the lower (0) or upper (1) half of two tiles' band."""
    block = sign * (q_first - k_first) // tile.size - sums.lowest + half
    return ((tl.program_id(0).to(tl.int64) * sums.blocks + block) * tile.size) + tl.arange(0, tile.size)


@triton.jit
def gradients_through_a(x, tile: tl.constexpr, sums, head, sign, r, turned, waiting, q_first, k_first):
    """For the half band that no later tile of keys uses: add to table A's gradients, and return r's gradients,
    [S, padded].

    `turned`, `waiting`: [S, S] gradients of the scores, arranged by distance, of this tile of keys and of the previous.
    """
    half = (sign + 1) // 2
    complete = tl.where(in_upper_half(tile, sign, k_first, False) == (sign > 0), turned, waiting)
    at = table_sum_rows(tile, sums, sign, q_first, k_first, half)
    add_vectors(x, tile, sums.a, head, at, matrix_product(tl.trans(complete), r))
    return matrix_product(complete, load_band(x, tile, x.table_a, head, sign, q_first, k_first, half))


@triton.jit
def gradients_through_b(x, tile: tl.constexpr, sums, head, sign, k, turned, waiting, q_first, k_first):
    """For the half band that no later tile of queries uses: add to table B's gradients, and return k's gradients."""
    half = (1 - sign) // 2
    complete = tl.where(in_upper_half(tile, sign, q_first, True) == (sign < 0), turned, waiting)
    at = table_sum_rows(tile, sums, sign, q_first, k_first, half)
    add_vectors(x, tile, sums.b, head, at, matrix_product(complete, k))
    return matrix_product(tl.trans(complete), load_band(x, tile, x.table_b, head, sign, q_first, k_first, half))


@triton.jit
def gradients_through_c(x, tile: tl.constexpr, sums, head, sign, turned, q_first, k_first):
    """Add the two tiles' gradients to those of table C, for both half bands. `turned`: as in `gradients_through_a`."""
    upper = in_upper_half(tile, sign, k_first, False)
    for half in tl.static_range(2):
        at = table_sum_rows(tile, sums, sign, q_first, k_first, half)
        tl.atomic_add(
            sums.c + at * x.heads + head,
            tl.sum(tl.where(upper == (half == 1), turned, 0.0), 0),
            sem="relaxed",
        )


@triton.jit
def process_query_tile(
    x, grad, context, log_sums, deltas, d_q, d_r, d_segments, sums, row, q_first, tile: tl.constexpr
):
    """Do the work of `queries_kernel` for one tile of queries."""
    head = tl.program_id(1)
    start, length = row_bounds(x, row)
    if q_first < length:
        sign = row_sign(x, row)
        q_at, q_here = find_queries(x, tile, start, length, q_first)
        q, r, grads, log_sum = load_queries(x, tile, grad, log_sums, head, q_at, q_here)
        delta = compute_deltas(x, tile, context, grads, deltas, head, q_at, q_here)
        dq = tl.full([tile.size, tile.padded], 0.0, tile.sums)
        dr = tl.full([tile.size, tile.padded], 0.0, tile.sums)
        d_same, d_other = tl.full([tile.size], 0.0, tile.sums), tl.full([tile.size], 0.0, tile.sums)
        waiting = tl.full([tile.size, tile.size], 0.0, q.dtype)
        k_start, k_length = key_bounds(x, row, start, length)
        low, high = keys_in_reach(x, tile, k_length, q_first)
        for k_first in range(low, high, tile.size):
            k_at, k_here = find_keys(x, tile, row, k_start, k_length, k_first)
            k = load_vectors(x, tile, x.k, head, k_at, k_here)
            v = load_vectors(x, tile, x.v, head, k_at, k_here)
            _, d_scores = softmax_gradients(
                x, tile, head, sign, q, r, k, v, grads, log_sum, delta,
                q_first, q_at, q_here, k_first, k_at, k_here,
            )  # fmt: skip
            dq += matrix_product(d_scores.to(k.dtype), k)
            if x.table_c is not None:
                turned = gather_by_distance(tile, sign, d_scores, k_first)
                gradients_through_c(x, tile, sums, head, sign, turned, q_first, k_first)
            if x.table_a is not None:
                turned = gather_by_distance(tile, sign, d_scores, k_first).to(q.dtype)
                by_r = gradients_through_a(x, tile, sums, head, sign, r, turned, waiting, q_first, k_first)
                waiting = turned
                if x.r is None:
                    dq += by_r
                else:
                    dr += by_r
            if x.segment_scores is not None:
                apart = in_other_segment(x, q_at, q_here, k_at, k_here)
                d_other += tl.sum(tl.where(apart, d_scores, 0.0), 1)
                d_same += tl.sum(tl.where(apart, 0.0, d_scores), 1)
        if x.table_a is not None:
            end = low + tl.cdiv(high - low, tile.size) * tile.size
            none = tl.full([tile.size, tile.size], 0.0, q.dtype)
            by_r = gradients_through_a(x, tile, sums, head, sign, r, none, waiting, q_first, end)
            if x.r is None:
                dq += by_r
            else:
                dr += by_r
        store_vectors(x, tile, d_q, head, q_at, q_here, dq)
        if x.r is not None:
            store_vectors(x, tile, d_r, head, q_at, q_here, dr)
        if x.segment_scores is not None:
            place = d_segments + (q_at * x.heads + head) * 2
            tl.store(place, d_same.to(d_segments.dtype.element_ty), mask=q_here)
            tl.store(place + 1, d_other.to(d_segments.dtype.element_ty), mask=q_here)


@triton.jit
def queries_kernel(x, grad, context, log_sums, deltas, d_q, d_r, d_segments, sums, tiles, tile: tl.constexpr):
    """Compute the gradients of q, r, segment scores and tables A and C, and the deltas [M, N].

    Without tables A and C, a program has one tile of queries and the grid is (R * tiles, N); with either, a program has
    every n-th tile and the grid is (n, N).
    """
    if x.table_a is None and x.table_c is None:
        row, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        process_query_tile(
            x, grad, context, log_sums, deltas, d_q, d_r, d_segments, sums, row, number * tile.size, tile
        )
    else:
        for task in range(tl.program_id(0), x.rows * tiles, tl.num_programs(0)):
            row, number = row_and_tile(task, tiles)
            process_query_tile(
                x, grad, context, log_sums, deltas, d_q, d_r, d_segments, sums, row, number * tile.size, tile
            )
            tl.debug_barrier()  # the next tile adds to the same sums, perhaps from other threads


@triton.jit
def row_and_tile(task, tiles):
    """Return the row and the tile of task number `task`. Each row's tiles are rotated by the row's number, so that no
    program gets the costliest tile of every row (tiles of causal rows differ in work)."""
    row = task // tiles
    return row, (task + row) % tiles


@triton.jit
def queries_in_reach(x, tile: tl.constexpr, length, k_first):
    """Return (start, stop), positions of the queries that may see a key of the tile; `start` is a multiple of S."""
    low, high = 0, length
    if x.window is not None:
        low = tl.maximum(k_first - x.window, 0) // tile.size * tile.size
        high = tl.minimum(length, k_first + tile.size + x.window)
    if x.causal is not None:
        low = tl.maximum(low, k_first)
    return low, high


@triton.jit
def process_key_tile(x, grad, log_sums, deltas, d_k, d_v, sums, row, number, tile: tl.constexpr):
    """Do the work of `keys_kernel` for one tile of keys."""
    head = tl.program_id(1)
    k_first = (number - memory_tile_count(x, tile)) * tile.size
    start, length = row_bounds(x, row)
    k_start, k_length = key_bounds(x, row, start, length)
    if k_first < k_length:
        sign = row_sign(x, row)
        k_at, k_here = find_keys(x, tile, row, k_start, k_length, k_first)
        k = load_vectors(x, tile, x.k, head, k_at, k_here)
        v = load_vectors(x, tile, x.v, head, k_at, k_here)
        dk = tl.full([tile.size, tile.padded], 0.0, tile.sums)
        dv = tl.full([tile.size, tile.padded], 0.0, tile.sums)
        waiting = tl.full([tile.size, tile.size], 0.0, k.dtype)
        low, high = queries_in_reach(x, tile, length, k_first)
        for q_first in range(low, high, tile.size):
            q_at, q_here = find_queries(x, tile, start, length, q_first)
            q, r, grads, log_sum = load_queries(x, tile, grad, log_sums, head, q_at, q_here)
            delta = load_deltas(x, deltas, head, q_at, q_here)
            dropped, d_scores = softmax_gradients(
                x, tile, head, sign, q, r, k, v, grads, log_sum, delta,
                q_first, q_at, q_here, k_first, k_at, k_here,
            )  # fmt: skip
            dv += matrix_product(tl.trans(dropped.to(grads.dtype)), grads)
            dk += matrix_product(tl.trans(d_scores.to(q.dtype)), q)
            if x.table_b is not None:
                turned = gather_by_key_distance(tile, sign, d_scores, q_first).to(k.dtype)
                dk += gradients_through_b(x, tile, sums, head, sign, k, turned, waiting, q_first, k_first)
                waiting = turned
        if x.table_b is not None:
            end = low + tl.cdiv(high - low, tile.size) * tile.size
            none = tl.full([tile.size, tile.size], 0.0, k.dtype)
            dk += gradients_through_b(x, tile, sums, head, sign, k, none, waiting, end, k_first)
        store_vectors(x, tile, d_k, head, k_at, k_here, dk)
        store_vectors(x, tile, d_v, head, k_at, k_here, dv)


@triton.jit
def keys_kernel(x, grad, log_sums, deltas, d_k, d_v, sums, tiles, tile: tl.constexpr):
    """Compute the gradients of keys, values and table B.

    Without table B, a program has one tile of keys and the grid is (R * tiles, N); with it, a program has every n-th
    tile and the grid is (n, N).
    """
    if x.table_b is None:
        row, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        process_key_tile(x, grad, log_sums, deltas, d_k, d_v, sums, row, number, tile)
    else:
        for task in range(tl.program_id(0), x.rows * tiles, tl.num_programs(0)):
            row, number = row_and_tile(task, tiles)
            process_key_tile(x, grad, log_sums, deltas, d_k, d_v, sums, row, number, tile)
            tl.debug_barrier()  # the next tile adds to the same sums, perhaps from other threads
