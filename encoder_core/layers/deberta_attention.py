"""Disentangled attention (He et al. 2021, DeBERTa, section 3.1): scores of contents, and with relative positions.

    score(q, k) = (Q_q . K_k  +  Q_q . PK_d  +  PQ_d . K_k) / sqrt(3 D),    d the table row of the distance q - k

Q and K are projections of contents, PQ and PK of the position table: a learned vector for each distance or bucket. The
paper omits a fourth term, PQ_d . PK_d, position to position; with it, the divisor is sqrt(4 D).

Shapes: T tokens, M queries, H hidden, N heads, D head width, P table rows in use; R rows, K longest row, Q most
queries of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from encoder_core.batch import copy_to_device
from encoder_core.layers.attention import attend_padded
from encoder_core.layers.cpu_relative import HIDDEN_KEY_SCORE, RelativeRow, blocked_relative_attention
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.gpu_attention import fused_attention, fused_supports
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.parameters import Bias, JoinedLinear, project
from encoder_core.layers.rows import Rows
from encoder_core.layers.sizes import log_buckets
from encoder_core.random_draws import table_keys


@dataclass(frozen=True)
class Relations:
    """The relative positions of queries and keys in a batch, the same for all layers.

    Attributes:
        table: [P, H], the range of the position table that rows of this length use.
        places: [2 K - 1] int64, row of `table` for each distance from key to query, in ascending order.
        index: [R or 1, Q, K] int64, row of `table` for each query and key.
        first: index of the first row of `table` in the whole position table.
        hidden: [R or 1, Q, K] bool, true for keys after the query; None if rows are not causal.
    """

    table: Float[Tensor, "places hidden"]
    places: Int[Tensor, " distances"]
    index: Int[Tensor, "#rows queries keys"]
    first: int
    hidden: Bool[Tensor, "#rows queries keys"] | None = None

    @property
    def random_keys(self) -> Int[Tensor, " places"]:
        """Key of each table row, from which its random draws are hashed."""
        return table_keys(self.first, self.first + len(self.table), self.table.device)


class RelativePositions(nn.Module):
    """The table of relative positions, and the table row of each distance.

    If `buckets` is None, every distance below `longest` has its own row (DeBERTa, section 3.1). Otherwise distances
    share `buckets` rows in each direction (`log_buckets`), and a LayerNorm is applied to the table (DeBERTa v2).
    """

    def __init__(self, longest: int, hidden: int, *, buckets: int | None, eps: float) -> None:
        super().__init__()
        self.steps = tuple(range(longest)) if buckets is None else log_buckets(buckets, longest)
        self.span = longest if buckets is None else buckets  # table row of distance 0
        self.embedding = nn.Embedding(2 * self.span, hidden)
        self.norm = None if buckets is None else nn.LayerNorm(hidden, eps=eps)

    def forward(self, places_P: Int[Tensor, " places"]) -> Float[Tensor, "places hidden"]:
        """Return rows `places_P` of the table."""
        table_PH: Tensor = self.embedding(places_P)
        return table_PH if self.norm is None else self.norm(table_PH)

    def relate(self, queries: Int[Tensor, " tokens"], rows: Rows, query_rows: Rows) -> Relations:
        """Return the relative positions of queries and all tokens. `queries`: the queries' positions in their rows;
        `query_rows`: which queries belong to which row.
        """
        reach = self.steps[rows.max_length - 1]
        low, high = max(0, self.span - reach), min(2 * self.span, self.span + reach + 1)
        table_PH = self(torch.arange(low, high, device=queries.device))
        keys_K = torch.arange(rows.max_length, device=queries.device)
        if query_rows is rows:
            distance = (keys_K[:, None] - keys_K)[None]
        else:
            distance = query_rows.pad(queries)[:, :, None] - keys_K
        ahead = torch.tensor(self.steps[: rows.max_length], dtype=torch.int64, device="cpu")
        steps = torch.cat([-ahead[1:].flip(0), ahead])
        places = copy_to_device((steps + self.span).clamp(0, 2 * self.span - 1) - low, queries.device)
        hidden = distance < 0 if rows.causal else None
        return Relations(table_PH, places, places[distance + rows.max_length - 1], low, hidden)


@dataclass(frozen=True)
class Operands:
    """The projected inputs of attention in one layer.

    Attributes:
        q: [M, N, D], projected queries.
        k, v: [T, N, D], projected keys and values of all tokens.
        position_q, position_k: [P, N, D], projections of the table of relative positions.
        position_scores: [P, N], position_q . position_k; None: scores have no position-to-position term.
    """

    q: Float[Tensor, "queries heads width"]
    k: Float[Tensor, "tokens heads width"]
    v: Float[Tensor, "tokens heads width"]
    position_q: Float[Tensor, "places heads width"]
    position_k: Float[Tensor, "places heads width"]
    position_scores: Float[Tensor, "places heads"] | None = None

    @property
    def scale(self) -> float:
        terms = 3 if self.position_scores is None else 4
        return float((terms * self.q.shape[-1]) ** -0.5)

    def with_position_scores(self) -> "Operands":
        """Return the operands with `position_scores`, for the position-to-position term."""
        return replace(self, position_scores=(self.position_q * self.position_k).sum(-1))


DisentangledKernel = Callable[[Operands, Relations, Rows, Rows, float], Tensor]
"""(operands, relations, rows of the queries, rows, dropout) -> context [M, N, D]; dropout acts on probabilities."""


def attend_with_best_kernel(
    operands: Operands, relations: Relations, query_rows: Rows, rows: Rows, dropout: float
) -> Float[Tensor, "queries heads width"]:
    """Compute attention with the kernel that a trial preferred, or the default one.

    The default is `attend_fused` on a GPU, `attend_blocked` on a CPU if the queries are the tokens themselves, and
    `attend_padded_rows` otherwise.
    """
    device, known = operands.q.device.type, query_rows is rows or query_rows.at is not None
    possible: list[Kernel] = ["padded", "written"]
    if query_rows is rows and device == "cpu" and len(operands.q):
        possible.insert(0, "blocked")
    if len(operands.q) and known and fused_supports(device, operands.q.dtype, operands.q.shape[-1]):
        possible.insert(0, "fused")
    match pick(possible, dropped=dropout > 0.0):
        case "fused":
            return attend_fused(operands, relations, query_rows, rows, dropout)
        case "blocked":
            return attend_blocked(operands, relations, query_rows, rows, dropout)
        case chosen:
            return attend_padded_rows(operands, relations, query_rows, rows, dropout, use_torch=chosen != "written")


def attend_blocked(
    operands: Operands, relations: Relations, query_rows: Rows, rows: Rows, dropout: float
) -> Float[Tensor, "queries heads width"]:
    """Compute attention on a CPU row by row, in cache-sized pieces, without padding or gathers. The queries must be
    the tokens themselves.
    """
    assert query_rows is rows
    offsets = relations.places.flip(0)  # table rows by distance from query to key, the negative of key to query
    table_k_NED = operands.position_k.index_select(0, offsets).transpose(0, 1).contiguous()
    table_q_NED = operands.position_q.index_select(0, relations.places).transpose(0, 1).contiguous()
    scores_NE = None
    if operands.position_scores is not None:
        scores_NE = operands.position_scores.index_select(0, offsets).T * operands.scale
    q = operands.q * operands.scale
    hidden = None if relations.hidden is None else relations.hidden[0].to(q.dtype) * HIDDEN_KEY_SCORE
    lines = [_relative_row(start, stop, rows.max_length - 1, hidden) for start, stop in rows.bounds]
    return blocked_relative_attention(
        q,
        operands.k,
        operands.v,
        q,
        table_k_NED,
        table_q_NED * operands.scale,
        scores_NE,
        rows.random_keys,
        lines,
        dropout,
    )


def _relative_row(start: int, stop: int, origin: int, hidden: Tensor | None) -> RelativeRow:
    """Return the row of tokens [start, stop). `hidden`: [K, K], scores that hide later keys, for the longest row."""
    length = stop - start
    own = None if hidden is None else hidden[:length, :length]
    return RelativeRow(slice(start, stop), slice(start, stop), origin, hidden=own)


def attend_fused(
    operands: Operands, relations: Relations, query_rows: Rows, rows: Rows, dropout: float
) -> Float[Tensor, "queries heads width"]:
    """Compute attention on a GPU, without padding and without scores in memory; see `encoder_core/kernels`."""

    # The gradient of F.embedding is summed in a fixed order; that of table[places] is not.
    def rows_by_distance(table: Tensor) -> Tensor:
        return F.embedding(relations.places, table.flatten(1)).view(-1, *table.shape[1:])

    between = operands.position_scores
    terms = {
        "table_a": rows_by_distance(operands.position_k),
        "table_b": rows_by_distance(operands.position_q),
        "table_c": None if between is None else rows_by_distance(between),
    }
    return fused_attention(
        operands.q,
        operands.k,
        operands.v,
        query_rows=query_rows,
        rows=rows,
        scale=operands.scale,
        dropout=dropout,
        terms=terms,
        center=rows.max_length - 1,
    )


def attend_padded_rows(
    operands: Operands,
    relations: Relations,
    query_rows: Rows,
    rows: Rows,
    dropout: float,
    *,
    use_torch: bool = True,
) -> Float[Tensor, "queries heads width"]:
    """Compute attention on rows padded to a rectangle. Position terms enter `attend_padded` as a bias."""
    q_RNQD, k_RNKD, v_RNKD = (
        r.pad(x).transpose(1, 2) for r, x in ((query_rows, operands.q), (rows, operands.k), (rows, operands.v))
    )
    position_q_NDP, position_k_NDP = (p.permute(1, 2, 0) for p in (operands.position_q, operands.position_k))
    index_R1QK = relations.index[:, None]
    shape = (rows.row_count, q_RNQD.shape[1], q_RNQD.shape[2], k_RNKD.shape[2])
    to_position = (q_RNQD @ position_k_NDP).gather(-1, index_R1QK.expand(shape))
    of_position = (k_RNKD @ position_q_NDP).gather(-1, index_R1QK.expand(shape).transpose(2, 3)).transpose(2, 3)
    bias_RNQK = to_position + of_position
    if operands.position_scores is not None:
        bias_RNQK = bias_RNQK + operands.position_scores[relations.index].movedim(-1, 1)
    bias_RNQK = bias_RNQK * operands.scale
    if rows.mask is not None:
        bias_RNQK = bias_RNQK.masked_fill(~rows.mask, float("-inf"))
    if relations.hidden is not None:
        bias_RNQK = bias_RNQK.masked_fill(relations.hidden[:, None], float("-inf"))
    context_RNQD = attend_padded(
        q_RNQD,
        k_RNKD,
        v_RNKD,
        bias_RNQK,
        query_rows,
        dropout,
        scale=operands.scale,
        use_torch=use_torch,
    )
    return query_rows.unpad(context_RNQD.transpose(1, 2))


class FusedProjections(nn.Module):
    """DeBERTa v1's projections: one matrix with each head's query, key and value. Only query and value have biases;
    positions have separate projections."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.content = JoinedLinear(hidden, (hidden // heads,) * 3, bias=False, times=heads)
        self.query = Bias(hidden)
        self.value = Bias(hidden)
        self.position_key = nn.Linear(hidden, hidden, bias=False)
        self.position_query = nn.Linear(hidden, hidden)

    def forward(self, queries_MH: Tensor | None, x_TH: Tensor, table_PH: Tensor) -> Operands:
        q, k, v = self._contents(x_TH)
        if queries_MH is not None:  # keys and values of this product are not used, but queries are few
            q, _, _ = self._contents(queries_MH)
        return Operands(
            self._split_heads(self.query(q)),
            self._split_heads(k),
            self._split_heads(self.value(v)),
            self._split_heads(self.position_query(table_PH)),
            self._split_heads(self.position_key(table_PH)),
        )

    def _contents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [tokens, H] each, without biases."""
        q, k, v = self.content(x).view(len(x), self.heads, 3, x.shape[-1] // self.heads).unbind(2)
        return q.flatten(1), k.flatten(1), v.flatten(1)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)


class SharedProjections(nn.Module):
    """DeBERTa v2's and v3's projections. Those of queries and keys also project the relative positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)

    def forward(self, queries_MH: Tensor | None, x_TH: Tensor, table_PH: Tensor) -> Operands:
        if queries_MH is None:
            contents = project(x_TH, (self.query, self.key, self.value))
        else:
            contents = (self.query(queries_MH), *project(x_TH, (self.key, self.value)))
        projected = (*contents, *project(table_PH, (self.query, self.key)))
        return Operands(*(torch.unflatten(x, -1, (self.heads, -1)) for x in projected))


class DisentangledAttention(nn.Module):
    """Disentangled attention with its projections. `dropout` acts on the position table, with new draws in each layer.
    `position_to_position`: whether scores have the position-to-position term.
    """

    def __init__(
        self,
        projections: FusedProjections | SharedProjections,
        hidden: int,
        *,
        dropout: float,
        attention_dropout: float,
        position_to_position: bool,
        attend: DisentangledKernel,
    ) -> None:
        super().__init__()
        self.projections = projections
        self.output = nn.Linear(hidden, hidden)
        self.position_dropout = Dropout(dropout)
        self.attention_dropout = attention_dropout
        self.position_to_position = position_to_position
        self.attend = attend

    def forward(
        self,
        queries_MH: Float[Tensor, "queries hidden"] | None,
        x_TH: Float[Tensor, "tokens hidden"],
        relations: Relations,
        query_rows: Rows,
        rows: Rows,
    ) -> Float[Tensor, "queries hidden"]:
        """Return the kernel's context for queries that see all tokens of their rows; the layer then applies `output`.

        `queries_MH` None: the tokens themselves are the queries.
        """
        operands = self.projections(queries_MH, x_TH, self.position_dropout(relations.table, relations.random_keys))
        if self.position_to_position:
            operands = operands.with_position_scores()
        dropout = self.attention_dropout if self.training else 0.0
        context_MND = self.attend(operands, relations, query_rows, rows, dropout)
        if not len(x_TH):  # kernels would leave the position projections, which ZeRO needs, out of the graph
            context_MND = context_MND + 0.0 * (operands.position_q.sum() + operands.position_k.sum())
        return context_MND.flatten(-2)
