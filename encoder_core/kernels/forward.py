"""The fused attention's forward kernel: online softmax (Dao et al., 2022, section 3.1) over tiles of keys.

A program has one tile of queries of one row and head. It stores the context and, for each query, the log2 of the sum
of its exponentials. Names and arguments: `operands.py` and `tile.py`.
"""

import triton
import triton.language as tl

from encoder_core.kernels.tile import (
    find_keys,
    find_queries,
    keep_mask,
    key_bounds,
    load_vectors,
    matrix_product,
    memory_tile_count,
    row_bounds,
    row_sign,
    store_vectors,
    tile_scores,
)


@triton.jit
def keys_in_reach(x, tile: tl.constexpr, length, q_first):
    """Return (start, stop), positions of the keys that a query of the tile may see; `start` is a multiple of S."""
    low, high = 0 - memory_tile_count(x, tile) * tile.size, length
    if x.window is not None:
        low = tl.maximum(q_first - x.window, 0) // tile.size * tile.size
        high = tl.minimum(length, q_first + tile.size + x.window)
    if x.causal is not None:
        high = tl.minimum(high, q_first + tile.size)
    return low, high


@triton.jit
def forward_kernel(x, context, log_sums, tiles, tile: tl.constexpr):
    """Compute context [M, N, D] and log_sums [M, N]; a query that sees no key gets 0 and infinity. `tiles`:
    number of tiles of queries in the longest row. The grid is (R * tiles, N)."""
    row, head = tl.program_id(0) // tiles, tl.program_id(1)
    q_first = tl.program_id(0) % tiles * tile.size
    start, length = row_bounds(x, row)
    if q_first >= length:
        return
    sign = row_sign(x, row)
    q_at, q_here = find_queries(x, tile, start, length, q_first)
    q = load_vectors(x, tile, x.q, head, q_at, q_here)
    r = q
    if x.r is not None:
        r = load_vectors(x, tile, x.r, head, q_at, q_here)
    highest = tl.full([tile.size], float("-inf"), tile.sums)
    total = tl.full([tile.size], 0.0, tile.sums)
    mixed = tl.full([tile.size, tile.padded], 0.0, tile.sums)
    k_start, k_length = key_bounds(x, row, start, length)
    low, high = keys_in_reach(x, tile, k_length, q_first)
    for k_first in range(low, high, tile.size):
        k_at, k_here = find_keys(x, tile, row, k_start, k_length, k_first)
        k = load_vectors(x, tile, x.k, head, k_at, k_here)
        scores = tile_scores(x, tile, head, sign, q, r, k, q_first, q_at, q_here, k_first, k_at, k_here)
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        if x.draws is not None:
            weights = tl.where(keep_mask(x, tile, head, q_at, q_here, k_first), weights, 0.0)
        v = load_vectors(x, tile, x.v, head, k_at, k_here)
        mixed = mixed * shrink[:, None] + matrix_product(weights.to(v.dtype), v)
        highest = higher
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    store_vectors(x, tile, context, head, q_at, q_here, mixed * (x.inverse / total)[:, None])
    log_sum = tl.where(blind, float("inf"), highest + tl.log2(total))
    tl.store(log_sums + q_at * x.heads + head, log_sum, mask=q_here)
