"""The inputs of the fused attention kernels, and the formula of their scores.

    score(i, j) = scale * (q_i . k_j  +  r_i . A[e]  +  k_j . B[e]  +  c[e]  +  g_i[s]),
    e = sign * (position of query i - position of key j) + center,    s = 1 if i and j are in different segments

A, B, c and g are `table_a`, `table_b`, `table_c` and `segment_scores` of `KernelInputs`.
Every family leaves most terms out (`None`), and kernels are compiled without them. Tables have one row for each
distance, even if the model's distances share buckets: a tile of queries and a tile of keys, whose distances are
consecutive, use consecutive rows.

Shapes: T tokens of R rows, M queries, K = T + R * carried keys (or the keys of other rows, `cu_seqlens_k`), N heads, D
head width, E distances. Tensors are contiguous.
"""

from typing import Any, NamedTuple

FUSED_MULTIPLY_ADDS = {"enable_fp_fusion": True}
"""Launch option that lets the compiler fuse a product and a sum, which are then rounded once. Results depend on it, so
it is passed explicitly: its default depends on TRITON_DEFAULT_FP_FUSION and on Triton's version (3.10)."""


class KernelInputs(NamedTuple):
    """The inputs of a kernel: tensors on the host, pointers in a kernel.

    Attributes:
        q: [M, N, D], queries.
        k, v: [K, N, D], keys and values; for each row its memory and then its tokens.
        r: [M, N, D], vectors that are multiplied with table A; None: the queries are.
        table_a, table_b: [E, N, D], vectors for each distance.
        table_c: [E, N], scores for each distance.
        segment_scores: [M, N, 2], scores for keys of the query's own segment and of others.
        segments_q, segments_k: [M] and [K] int64, segments of queries and keys.
        ranks_q, ranks_k: [M] and [K] int64; a query sees only the keys of lower rank. None: it sees all of its row.
        slots: [T] int32, index of the query at each token, -1 for none; None: the tokens are the queries.
        signs: [R] int32, 1, or -1 for a reversed row; None: all 1.
        draws: [M] int64, keys from which each query's dropout is hashed (`random_draws.py`); None: no dropout.
        cu_seqlens: [R + 1] int32, bounds of the rows in the tokens.
        cu_seqlens_k: [R + 1] int32, bounds of the rows of keys and values in cross-attention, which has no tables,
            window, causality or memory. None: self-attention.
        heads, rows: N, R.
        carried: number of memory keys before each row's first token, at positions -carried to -1.
        center: index of distance 0 in the tables.
        distances: E, number of rows of the tables.
        window: number of tokens that a query sees on each side; None: its whole row.
        causal: 1 if queries see no later keys (then no row is reversed); None if they do.
        scale: factor of the scores.
        threshold: number of a draw's 65,536 values that drop a probability.
        inverse: factor of the probabilities that dropout keeps.
    """

    q: Any
    k: Any
    v: Any
    r: Any
    table_a: Any
    table_b: Any
    table_c: Any
    segment_scores: Any
    segments_q: Any
    segments_k: Any
    ranks_q: Any
    ranks_k: Any
    slots: Any
    signs: Any
    draws: Any
    cu_seqlens: Any
    cu_seqlens_k: Any
    heads: Any
    rows: Any
    carried: Any
    center: Any
    distances: Any
    window: Any
    causal: Any
    scale: Any
    threshold: Any
    inverse: Any


class Tile(NamedTuple):
    """The size of a kernel's tiles, a compile-time constant.

    Attributes:
        size: S, number of queries, and of keys, in a tile.
        width: D, head width.
        padded: D rounded up to a power of two, at least 16.
        sums: dtype of sums: fp32, or fp64 for fp64 inputs.
        quads: whether the dropout column of a tile's first key is a multiple of 4, so that a hash serves four keys.
    """

    size: Any
    width: Any
    padded: Any
    sums: Any
    quads: Any
