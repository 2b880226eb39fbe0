"""The fused attention's gradients by its tables, without atomics.

Pairs of tiles of queries and keys with equal differences of their first positions use the same band of a table. A
program has one such difference, one head and every n-th row, and goes through the tiles in order. Bands of
neighbouring differences overlap by half and are added up afterwards in a fixed order (`assemble`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_core.kernels.backward import load_deltas, load_queries, through_softmax
from encoder_core.kernels.tile import (
    by_distance,
    by_distance_of_keys,
    carried_tiles,
    find_keys,
    find_queries,
    load_vectors,
    product,
    row_bounds,
    sign_of,
    store_vectors,
)


@triton.jit
def _zeros(tile: tl.constexpr):
    return tl.full([tile.size, tile.padded], 0.0, tile.sums)


@triton.jit
def tables_kernel(x, grad, log_sums, deltas, d_a, d_b, d_c, lowest, differences, splits, tile: tl.constexpr):
    """Compute bands [splits, differences, 2 S, N, D] and [..., N] in the dtype of sums.

    The first difference is `lowest` tiles. Grid (differences * splits, N).
    """
    split, head = tl.program_id(0) // differences, tl.program_id(1)
    difference = (tl.program_id(0) % differences + lowest) * tile.size
    a_lower, a_upper = _zeros(tile), _zeros(tile)
    b_lower, b_upper = _zeros(tile), _zeros(tile)
    c_lower, c_upper = tl.full([tile.size], 0.0, tile.sums), tl.full([tile.size], 0.0, tile.sums)
    for row in range(split, x.rows, splits):
        start, length = row_bounds(x, row)
        sign = sign_of(x, row)
        apart = sign * difference
        low = tl.maximum(apart - carried_tiles(x, tile) * tile.size, 0)
        high = tl.minimum(length, length + apart)
        for q_first in range(low, high, tile.size):
            k_first = q_first - apart
            q_at, q_here = find_queries(x, tile, start, length, q_first)
            k_at, k_here = find_keys(x, tile, row, start, length, k_first)
            k = load_vectors(x, tile, x.k, head, k_at, k_here)
            v = load_vectors(x, tile, x.v, head, k_at, k_here)
            q, r, grads, log_sum = load_queries(x, tile, grad, log_sums, head, q_at, q_here)
            delta = load_deltas(x, deltas, head, q_at, q_here)
            _, ds = through_softmax(
                x, tile, head, sign, q, r, k, v, grads, log_sum, delta,
                q_first, q_at, q_here, k_first, k_at, k_here,
            )  # fmt: skip
            if x.table_a is not None:
                lower, upper = by_distance(tile, sign, ds, q_first)
                a_lower += product(tl.trans(lower.to(r.dtype)), r)
                a_upper += product(tl.trans(upper.to(r.dtype)), r)
            if x.table_b is not None:
                lower, upper = by_distance_of_keys(tile, sign, ds, q_first)
                b_lower += product(lower.to(k.dtype), k)
                b_upper += product(upper.to(k.dtype), k)
            if x.table_c is not None:
                lower, upper = by_distance(tile, sign, ds, q_first)
                c_lower += tl.sum(lower, 0)
                c_upper += tl.sum(upper, 0)
    at = tl.program_id(0).to(tl.int64) * (2 * tile.size) + tl.arange(0, tile.size)
    here = at >= 0
    if x.table_a is not None:
        store_vectors(x, tile, d_a, head, at, here, a_lower)
        store_vectors(x, tile, d_a, head, at + tile.size, here, a_upper)
    if x.table_b is not None:
        store_vectors(x, tile, d_b, head, at, here, b_lower)
        store_vectors(x, tile, d_b, head, at + tile.size, here, b_upper)
    if x.table_c is not None:
        tl.store(d_c + at * x.heads + head, c_lower)
        tl.store(d_c + (at + tile.size) * x.heads + head, c_upper)


def assemble(bands: Tensor, first: int, distances: int) -> Tensor:
    """Return [E, ...] from bands [splits, differences, 2 S, ...], the first of which begins at row `first` of the
    table.
    """
    halves: Tensor = bands.sum(0).unflatten(1, (2, -1))
    blocks = halves.new_zeros((len(halves) + 1, *halves.shape[2:]))
    blocks[:-1] += halves[:, 0]
    blocks[1:] += halves[:, 1]
    rows = blocks.flatten(0, 1)
    skipped = max(0, -first)
    rows = rows[skipped : distances - first]
    table: Tensor = rows.new_zeros((distances, *rows.shape[1:]))
    table[first + skipped : first + skipped + len(rows)] = rows
    return table


def differences_of(
    longest: int, carried: int, size: int, *, backwards: bool, causal: bool = False
) -> tuple[int, int]:
    """Return the first difference of positions, in tiles of `size`, and the number of differences.

    `causal`: no query sees a later key, so that no difference is negative.
    """
    ahead, before = (longest - 1) // size, -(-carried // size)
    lowest = 0 if causal else -ahead - (before if backwards else 0)
    return lowest, ahead + before - lowest + 1


def empty_bands(x: Tensor | None, *, splits: int, differences: int, size: int) -> Tensor | None:
    """Return uninitialised bands for the gradients by a table, in the dtype of sums."""
    if x is None:
        return None
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty((splits, differences, 2 * size, *x.shape[1:]), dtype=dtype, device=x.device)
