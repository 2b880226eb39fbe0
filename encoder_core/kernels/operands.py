"""The inputs of the fused attention's scores, as its kernels take them.

    score(i, j) = scale * (q_i . k_j  +  r_i . A[e]  +  k_j . B[e]  +  c[e]  +  g_i[s]),
    e = sign * (position of query i - position of key j) + center,    s = 1 if i and j are in different segments

Every family leaves most terms out; a kernel is compiled without them (`None`). Tables are indexed by distance.
Buckets are expanded beforehand, so that a tile of queries and a tile of keys, whose distances are consecutive, use
consecutive rows.

Shapes: T tokens of R rows, M queries, K = T + R * carried keys, or those of other rows, N heads, D head width, E
distances. Tensors are contiguous.
"""

from typing import Any, NamedTuple

FUSED_MULTIPLY_ADDS = {"enable_fp_fusion": True}
"""Option of a kernel's launch: a product and a sum may be rounded once. Named at each launch, since the bits of a run
depend on it: without it Triton takes the environment's TRITON_DEFAULT_FP_FUSION, and from 3.10 on another default."""


class KernelInputs(NamedTuple):
    """The inputs of a kernel: tensors on the host, pointers in a kernel.

    Attributes:
        q: [M, N, D], queries.
        k, v: [K, N, D], keys and values; for each row its memory and then its tokens.
        r: [M, N, D], vectors that are multiplied with table A instead of q; None: q.
        table_a, table_b: [E, N, D], vectors for each distance.
        table_c: [E, N], scores for each distance.
        segment_scores: [M, N, 2], scores for keys of the query's own segment and of others.
        segments_q, segments_k: [M] and [K] int64, segments of queries and keys.
        ranks_q, ranks_k: [M] and [K] int64; a query sees the keys of lower rank. None: all keys of its row.
        slots: [T] int32, index of the query at each token, -1 for none; None: the tokens are the queries.
        signs: [R] int32, 1, or -1 for a reversed row; None: all 1.
        draws: [M] int64, keys from which each query's dropout is hashed (`random_draws.py`); None: no dropout.
        cu_seqlens: [R + 1] int32, bounds of the rows in the tokens.
        cu_seqlens_k: [R + 1] int32, bounds of the rows of keys and values, if these are other tokens (attention across:
            without tables, window, causality and memory). None: the same tokens.
        heads, rows: N, R.
        carried: number of memory keys before each row's first token, at positions -carried to -1.
        center, distances: index of distance 0 in the tables, and E.
        window: number of tokens that a query sees on each side; None: its whole row.
        causal: 1 if a query sees no later key (then no row is reversed); None if it does.
        scale: factor of the scores.
        threshold: how many of the 65,536 values of a draw drop a probability.
        inverse: factor of the kept probabilities.
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
    """The size of a kernel's tiles, known when it is compiled.

    Attributes:
        size: number of queries, and of keys, in a tile; two tiles have fewer than twice as many distances.
        width: D.
        padded: D rounded up to a power of two, at least 16.
        sums: dtype of sums: fp32, or fp64 for fp64 inputs.
        quads: whether the column of a tile's first key is a multiple of 4.
    """

    size: Any
    width: Any
    padded: Any
    sums: Any
    quads: Any
