"""Relative positions of disentangled attention: a table of learned vectors, one per distance or bucket of distances.

Shapes: T tokens, H hidden, P places; R rows, K longest row, Q most queries of a row.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import sent
from encoder_core.draws import table_keys
from encoder_core.layers.rows import Rows


@dataclass(frozen=True)
class Relations:
    """Where each query and key of a batch stand to each other; the same for all layers.

    Attributes:
        table: [P, H], the part of the table that rows this long can reach, from row `first` on.
        places: [2 K - 1] int64, row of `table` for each distance from key to query, the most negative first.
        index: [R or 1, Q, K] int64, row of `table` for each query and key.
    """

    table: Float[Tensor, "places hidden"]
    places: Int[Tensor, " distances"]
    index: Int[Tensor, "#rows queries keys"]
    first: int

    @property
    def keys(self) -> Int[Tensor, " places"]:
        """What the draws of the table's rows are hashed from."""
        return table_keys(self.first, self.first + len(self.table), self.table.device)


class RelativePositions(nn.Module):
    """The table, and which of its rows belongs to which distance.

    With `buckets` None every distance below `longest` has its own row (DeBERTa, section 3.1), else distances share
    `buckets` rows each way, one each up to half of them and logarithmically beyond (DeBERTa v2). `norm` puts a
    LayerNorm over the table's rows (v2).
    """

    def __init__(
        self, longest: int, hidden: int, *, buckets: int | None = None, norm: bool = False, eps: float
    ) -> None:
        super().__init__()
        self.steps = tuple(range(longest)) if buckets is None else log_buckets(buckets, longest)
        self.span = longest if buckets is None else buckets
        self.embedding = nn.Embedding(2 * self.span, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps) if norm else None

    def forward(self, places_P: Int[Tensor, " places"]) -> Float[Tensor, "places hidden"]:
        """Rows of the table."""
        table_PH: Tensor = self.embedding(places_P)
        return table_PH if self.norm is None else self.norm(table_PH)

    def relate(self, queries: Int[Tensor, " tokens"], rows: Rows, query_rows: Rows) -> Relations:
        """Relations of queries at positions `queries` (in their rows, laid out by `query_rows`) to all tokens."""
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
        places = sent((steps + self.span).clamp(0, 2 * self.span - 1) - low, queries.device)
        return Relations(table_PH, places, places[distance + rows.max_length - 1], low)


def log_buckets(buckets: int, longest: int) -> tuple[int, ...]:
    """The bucket of each distance 0 .. longest - 1: the distance itself up to half of `buckets`, then
    logarithmic so that longest - 1 has the last (microsoft/DeBERTa, da_utils.py)."""
    exact = buckets // 2
    if longest - 1 <= exact:
        return tuple(range(longest))
    whole = math.log((longest - 1) / exact)
    return tuple(
        d if d <= exact else math.ceil(math.log(d / exact) / whole * (exact - 1)) + exact
        for d in range(longest)
    )
