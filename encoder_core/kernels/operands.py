"""What the scores of the fused attention are made of, as its kernels take it.

    score(i, j) = scale * (q_i . k_j  +  r_i . A[e]  +  k_j . B[e]  +  c[e]  +  g_i[s]),
    e = sign * (position of query i - position of key j) + center,    s = 1 if i and j are in different segments

Every family leaves most terms out; a kernel is compiled without them (`None`). Tables are indexed by distance: buckets
are spread out beforehand, so that a tile of queries and a tile of keys, whose distances are consecutive, meet
consecutive rows.

Shapes: T tokens of R rows, M queries, K = T + R * carried keys, N heads, D head width, E distances. Tensors are
contiguous.
"""

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """Tensors on the host, pointers in a kernel.

    Attributes:
        q: [M, N, D]; k, v: [K, N, D], of each row its carried keys and then its tokens.
        r: [M, N, D], what meets the table A in place of q; None: q.
        table_a, table_b: [E, N, D].
        table_c: [E, N].
        segment_scores: [M, N, 2], for keys of the query's own segment and of others.
        segments_q, segments_k: [M] and [K] int64.
        ranks_q, ranks_k: [M] and [K] int64; a query sees the keys of lower rank; None: all of its row.
        slots: [T] int32, the query that stands at each token, -1 for none; None: the tokens are the queries.
        signs: [R] int32, 1, or -1 where a row runs backwards; None: all 1.
        draws: [M] int64, what each query's dropout is hashed from (`draws.py`); None: no dropout.
        cu_seqlens: [R + 1] int32, of the tokens.
        heads, rows: N, R.
        carried: keys before each row's first token, at positions -carried to -1.
        center, distances: where distance 0 stands in the tables, and E.
        window: how far a query sees; None: all of its row.
        scale: of the scores.
        threshold: of the 65,536 values of a draw, how many drop a probability.
        inverse: what the kept ones are multiplied by.
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
    heads: Any
    rows: Any
    carried: Any
    center: Any
    distances: Any
    window: Any
    scale: Any
    threshold: Any
    inverse: Any


class Tile(NamedTuple):
    """How a kernel is cut, known when it is compiled.

    Attributes:
        size: queries, and keys, of one tile; distances of two tiles fit in twice as many.
        width: D.
        padded: the power of two, at least 16, that D fits in.
        sums: dtype of sums: fp32, fp64 for fp64 inputs.
        quads: the first of a tile's keys has a column that is a multiple of 4.
    """

    size: Any
    width: Any
    padded: Any
    sums: Any
    quads: Any
