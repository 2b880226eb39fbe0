"""Parts of the fused attention's kernels: the tokens, scores and dropout of a tile.

Common arguments: `x` is a `KernelInputs`, `tile` a `Tile` (`operands.py`). `q_first`, `k_first`: row positions of the
tile's first query and key. `q_at`, `k_at`: indices of its queries and keys; `q_here`, `k_here`: whether they exist.

A tile is S queries and S keys of one row and head, at consecutive positions. Their 2 S - 1 distances are consecutive,
so the scores of contents with distances are products with 2 S consecutive rows of a table (a band), read along
diagonals:

    scores[i, j] += (r @ band.T)[i, sign * (i - j) + S - 1]

A query needs S elements: the last ones of the product with the lower half of the band, and the first ones of the
product with the upper half. So one [S, S] matrix holds both, and reading along diagonals rotates each of its rows.

All sums are in fp32 (fp64 for fp64 inputs), scores in units of log2. Sums begin as `tl.full(shape, 0.0, dtype)`: up
to Triton 3.7.1, `tl.zeros` does not compile with a shape from a constexpr tuple.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # log2(e): exp(x) = exp2(x * LOG2_E)
# The constants of `random_draws.py`, as unsigned numbers.
_HEAD_MULTIPLIER = tl.constexpr(0xC2B2AE3D27D4EB4F)
GOLDEN_RATIO_64 = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def matrix_product(a, b):
    """Return a @ b. fp32 products take three TF32 passes of tensor cores, for nearly full precision."""
    if a.dtype == tl.float64:
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def row_bounds(x, row):
    """Return the first token of a row and its number of tokens."""
    start = tl.load(x.cu_seqlens + row)
    length = tl.load(x.cu_seqlens + row + 1) - start
    return start.to(tl.int64), length


@triton.jit
def key_bounds(x, row, start, length):
    """Return the first key of a row and its number of keys: from `cu_seqlens_k` if given, else `start`, `length`."""
    if x.cu_seqlens_k is not None:
        first = tl.load(x.cu_seqlens_k + row)
        length = tl.load(x.cu_seqlens_k + row + 1) - first
        start = first.to(tl.int64)
    return start, length


@triton.jit
def row_sign(x, row):
    """Return -1 for a reversed row, else 1."""
    if x.signs is None:
        return 1
    else:
        return tl.load(x.signs + row)


@triton.jit
def memory_tile_count(x, tile: tl.constexpr):
    """Return the number of tiles of memory keys, which have negative positions. Tiles begin at multiples of S."""
    return (x.carried + tile.size - 1) // tile.size


@triton.jit
def find_queries(x, tile: tl.constexpr, start, length, first):
    """Return [S] indices of the queries at row positions `first` to `first` + S - 1, and [S] whether they exist."""
    position = first + tl.arange(0, tile.size)
    here = position < length
    at = start + position
    if x.slots is not None:
        at = tl.load(x.slots + at, mask=here, other=-1).to(tl.int64)
        here = at >= 0
    return at, here


@triton.jit
def find_keys(x, tile: tl.constexpr, row, start, length, first):
    """Return [S] indices of the keys at row positions `first` to `first` + S - 1, and [S] whether they exist."""
    position = first + tl.arange(0, tile.size)
    here = (position < length) & (position >= 0 - x.carried)
    at = start + (row + 1) * x.carried + position
    return at, here


@triton.jit
def load_vectors(x, tile: tl.constexpr, pointer, head, at, here):
    """Load rows `at` of one head from a [rows, N, D] tensor, as [len(at), padded]; zeros where `here` is false."""
    column = tl.arange(0, tile.padded)
    place = pointer + (at.to(tl.int64) * x.heads + head)[:, None] * tile.width + column[None, :]
    return tl.load(place, mask=here[:, None] & (column < tile.width)[None, :], other=0.0)


@triton.jit
def store_vectors(x, tile: tl.constexpr, pointer, head, at, here, values):
    """Store `values` [len(at), padded] in rows `at` of a [rows, N, D] tensor; the inverse of `load_vectors`."""
    column = tl.arange(0, tile.padded)
    place = pointer + (at.to(tl.int64) * x.heads + head)[:, None] * tile.width + column[None, :]
    mask = here[:, None] & (column < tile.width)[None, :]
    tl.store(place, values.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def add_vectors(x, tile: tl.constexpr, pointer, head, at, values):
    """Add `values` to rows `at`. Only one program adds to a row, so the order of sums is fixed despite atomics."""
    column = tl.arange(0, tile.padded)
    place = pointer + (at.to(tl.int64) * x.heads + head)[:, None] * tile.width + column[None, :]
    tl.atomic_add(place, values, mask=(column < tile.width)[None, :], sem="relaxed")


@triton.jit
def load_band(x, tile: tl.constexpr, pointer, head, sign, q_first, k_first, half):
    """Load [S, padded]: the lower (0) or upper (1) half of the band of table A or B for two tiles' distances."""
    low = sign * (q_first - k_first) - (tile.size - 1) + x.center + half * tile.size
    rows = low + tl.arange(0, tile.size)
    return load_vectors(x, tile, pointer, head, rows, (rows >= 0) & (rows < x.distances))


@triton.jit
def distance_index(tile: tl.constexpr, sign, first):
    """Return [S, S], for each query and key the index of their distance in its half of the band.

    `first`, a multiple of S, does not change the result. It keeps the compiler from hoisting the indices out of the
    loop, where they would occupy registers.
    """
    i = tl.arange(0, tile.size) + (first & (tile.size - 1))
    return (sign * (i[:, None] - i[None, :]) - 1) & (tile.size - 1)


@triton.jit
def in_upper_half(tile: tl.constexpr, sign, first, of_keys: tl.constexpr):
    """Return [S queries, S columns], whether a query uses a column of the upper half of the band rather than of the
    lower one. With `of_keys`: [S columns, S keys], the same for keys."""
    i = tl.arange(0, tile.size) + (first & (tile.size - 1))
    if of_keys:
        limit = tl.where(sign > 0, tile.size - 1 - i, i)
        return i[:, None] < limit[None, :]
    else:
        limit = tl.where(sign > 0, i, tile.size - 1 - i)
        return i[None, :] < limit[:, None]


@triton.jit
def scores_by_a(x, tile: tl.constexpr, head, sign, r, q_first, k_first):
    """Return [S, S], the term r_i . A[e] of the scores (`operands.py`)."""
    lower = matrix_product(r, tl.trans(load_band(x, tile, x.table_a, head, sign, q_first, k_first, 0)))
    upper = matrix_product(r, tl.trans(load_band(x, tile, x.table_a, head, sign, q_first, k_first, 1)))
    both = tl.where(in_upper_half(tile, sign, k_first, False), upper, lower)
    return tl.gather(both, distance_index(tile, sign, k_first), 1)


@triton.jit
def scores_by_b(x, tile: tl.constexpr, head, sign, k, q_first, k_first):
    """Return [S, S], the term k_j . B[e] of the scores (`operands.py`)."""
    keys = tl.trans(k)
    lower = matrix_product(load_band(x, tile, x.table_b, head, sign, q_first, k_first, 0), keys)
    upper = matrix_product(load_band(x, tile, x.table_b, head, sign, q_first, k_first, 1), keys)
    both = tl.where(in_upper_half(tile, sign, k_first, True), upper, lower)
    return tl.gather(both, distance_index(tile, sign, k_first), 0)


@triton.jit
def gather_by_distance(tile: tl.constexpr, sign, values, first):
    """Reorder `values` [S queries, S keys] to [S queries, S columns]: each value moves to its distance's column in the
    half band. The inverse of reading along diagonals."""
    i = tl.arange(0, tile.size) + (first & (tile.size - 1))
    key = (i[:, None] - sign * (i[None, :] + 1)) & (tile.size - 1)
    return tl.gather(values, key, 1)


@triton.jit
def gather_by_key_distance(tile: tl.constexpr, sign, values, first):
    """Reorder `values` [S queries, S keys] to [S columns, S keys], as `gather_by_distance` does for queries."""
    i = tl.arange(0, tile.size) + (first & (tile.size - 1))
    query = (i[None, :] + sign * (i[:, None] + 1)) & (tile.size - 1)
    return tl.gather(values, query, 0)


@triton.jit
def in_other_segment(x, q_at, q_here, k_at, k_here):
    """Return [S queries, S keys], whether query and key are in different segments."""
    query = tl.load(x.segments_q + q_at, mask=q_here, other=0)
    key = tl.load(x.segments_k + k_at, mask=k_here, other=0)
    return query[:, None] != key[None, :]


@triton.jit
def pair_is_visible(x, tile: tl.constexpr, q_first, q_at, q_here, k_first, k_at, k_here):
    """Return [S queries, S keys], whether each query sees each key."""
    seen = q_here[:, None] & k_here[None, :]
    if x.window is not None:
        i = tl.arange(0, tile.size)
        seen &= tl.abs(q_first - k_first + i[:, None] - i[None, :]) <= x.window
    if x.causal is not None:
        i = tl.arange(0, tile.size)
        seen &= q_first - k_first + i[:, None] - i[None, :] >= 0
    if x.ranks_q is not None:
        query = tl.load(x.ranks_q + q_at, mask=q_here, other=0)
        key = tl.load(x.ranks_k + k_at, mask=k_here, other=0)
        seen &= key[None, :] < query[:, None]
    return seen


@triton.jit
def tile_scores(x, tile: tl.constexpr, head, sign, q, r, k, q_first, q_at, q_here, k_first, k_at, k_here):
    """Return the scores [S, S] in units of log2, -inf for keys that are not visible."""
    scores = matrix_product(q, tl.trans(k))
    if x.table_a is not None:
        scores += scores_by_a(x, tile, head, sign, r, q_first, k_first)
    if x.table_b is not None:
        scores += scores_by_b(x, tile, head, sign, k, q_first, k_first)
    if x.table_c is not None:
        i = tl.arange(0, tile.size)
        distance = sign * (q_first - k_first + i[:, None] - i[None, :]) + x.center
        known = (distance >= 0) & (distance < x.distances)
        scores += tl.load(x.table_c + distance * x.heads + head, mask=known, other=0.0).to(scores.dtype)
    if x.segment_scores is not None:
        place = x.segment_scores + (q_at * x.heads + head) * 2
        same = tl.load(place, mask=q_here, other=0.0).to(scores.dtype)
        other = tl.load(place + 1, mask=q_here, other=0.0).to(scores.dtype)
        apart = in_other_segment(x, q_at, q_here, k_at, k_here)
        scores += tl.where(apart, other[:, None], same[:, None])
    seen = pair_is_visible(x, tile, q_first, q_at, q_here, k_first, k_at, k_here)
    return tl.where(seen, scores * (x.scale * LOG2_E), float("-inf"))


@triton.jit
def mix_bits(x):
    """Apply splitmix64's mixing to 64-bit words (`random_draws.py`)."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def keep_mask(x, tile: tl.constexpr, head, q_at, q_here, k_first):
    """Return [S, S] bool, the probabilities that dropout keeps: `uniform_int16` >= threshold - 2**15."""
    drawn = tl.load(x.draws + q_at, mask=q_here, other=0).to(tl.uint64, bitcast=True)
    drawn += head.to(tl.uint64) * _HEAD_MULTIPLIER
    first = k_first + x.carried
    limit = (x.threshold - 0x8000) << 16
    if tile.quads:  # one hash serves four keys; it is computed once for every two of them
        pair = first // 2 + tl.arange(0, tile.size // 2)
        hashed = mix_bits(drawn[:, None] + ((pair // 2).to(tl.uint64) * GOLDEN_RATIO_64)[None, :])
        half = tl.where((pair % 2 == 0)[None, :], hashed.to(tl.uint32), (hashed >> 32).to(tl.uint32))
        half = half.to(tl.int32, bitcast=True)
        return tl.reshape(tl.join((half << 16), half) >= limit, [tile.size, tile.size])
    else:
        column = tl.maximum(first + tl.arange(0, tile.size), 0)
        hashed = mix_bits(drawn[:, None] + ((column // 4).to(tl.uint64) * GOLDEN_RATIO_64)[None, :])
        bits = (hashed >> ((column % 4) * 16).to(tl.uint64)[None, :]).to(tl.uint32)
        return (bits << 16).to(tl.int32, bitcast=True) >= limit
