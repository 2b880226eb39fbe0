"""Visibility and distances of keys for the queries of XLNet's streams (Yang et al. 2019, sections 2.2, 2.3 and 2.5).

The keys of a row are its memory, which all queries see, and its tokens. The content stream sees tokens that are not
later in the factorisation order; the query stream sees only earlier ones.

Shapes: T tokens, M queries; R rows, L longest row, C memory tokens, K = C + L keys, Q queries of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.layers.cpu_relative import HIDDEN_KEY_SCORE, RelativeRow
from encoder_core.layers.rows import Rows

_MEMORY_RANK = -1  # rank of memory keys, which come before every token in the factorisation order


@dataclass(frozen=True)
class AttentionScope:
    """The keys that one stream's queries see, the same in all layers. Derived tensors are computed when first used.

    Attributes:
        batch: the batch.
        tokens: rows of the batch's tokens.
        rows: rows of the stream's queries; for the content stream, `tokens` itself.
        carried: C, number of memory tokens before each row.
    """

    batch: Batch
    tokens: Rows
    rows: Rows
    carried: int

    @property
    def _serves_content_stream(self) -> bool:
        return self.rows is self.tokens

    def _select_queries(self, x: Shaped[Tensor, " tokens"]) -> Shaped[Tensor, " queries"]:
        return x if self.rows.at is None else x.index_select(0, self.rows.at)

    @cached_property
    def distance_index(self) -> Int[Tensor, "#rows queries keys"]:
        """[R or 1, Q, K] int64, row of the distance table for the distance from key to query."""
        keys_K = torch.arange(-self.carried, self.tokens.max_length, device=self.batch.tokens.device)
        if self._serves_content_stream:
            queries_RQ = keys_K[None, self.carried :]
        else:
            queries_RQ = self.rows.pad(self._select_queries(self.batch.positions))
        distance = queries_RQ[:, :, None] - keys_K
        if self.batch.reversed_rows is not None:
            distance = torch.where(self.batch.reversed_rows[:, None, None], -distance, distance)
        return distance - distance_range(self.batch, self.carried)[0]

    @cached_property
    def visible(self) -> Bool[Tensor, "#rows #queries keys"]:
        """[R, Q or 1, K] bool, whether each query sees each key."""
        lengths = self.tokens.cu_seqlens.diff()[:, None]
        columns = torch.arange(self.tokens.max_length, device=lengths.device)
        present = F.pad(columns < lengths, (self.carried, 0), value=True)[:, None, :]
        order = self.batch.order
        if order is None:
            return present
        keys = self.tokens.pad(order)[:, None, :]
        queries = self.rows.pad(self._select_queries(order))[:, :, None]
        in_order = keys <= queries if self._serves_content_stream else keys < queries
        return present & F.pad(in_order, (self.carried, 0), value=True)

    @cached_property
    def in_other_segment(self) -> Bool[Tensor, "rows queries keys"] | None:
        """[R, Q, K] bool, whether query and key are in different segments; None without segments.

        Memory counts as segment 0, as in the published code.
        """
        segments = self.batch.segments
        if segments is None:
            return None
        keys = F.pad(self.tokens.pad(segments), (self.carried, 0))
        return self.rows.pad(self._select_queries(segments))[:, :, None] != keys[:, None, :]

    @cached_property
    def one_hot_segments(self) -> tuple[Int[Tensor, "queries segments"], Int[Tensor, "all_keys segments"]]:
        """One-hot segments of the queries and of the keys. The batch must have segments; memory counts as segment 0."""
        segments = self.batch.segments
        assert segments is not None
        count = int(segments.max()) + 1
        queries, keys = self._select_queries(segments), self._with_memory_keys(segments, 0)
        return F.one_hot(queries.long(), count), F.one_hot(keys.long(), count)

    @cached_property
    def kernel_layout(self) -> dict[str, Any]:
        """Fields of `kernels.fused_attention.AttentionLayout` for the fused kernel."""
        batch, order, segments = self.batch, self.batch.order, self.batch.segments
        backwards = batch.reversed_rows
        ranks = None if order is None else self._select_queries(order) + int(self._serves_content_stream)
        return {
            "carried": self.carried,
            "center": -distance_range(batch, self.carried)[0],
            "signs": None if backwards is None else 1 - 2 * backwards.int(),
            "ranks_q": ranks,
            "ranks_k": None if order is None else self._with_memory_keys(order, _MEMORY_RANK),
            "segments_q": None if segments is None else self._select_queries(segments),
            "segments_k": None if segments is None else self._with_memory_keys(segments, 0),
        }

    def relative_rows(self, dtype: torch.dtype) -> tuple[RelativeRow, ...]:
        """Return the rows in the form that the blocked CPU kernel takes.

        If any row is reversed, the kernel's table has both directions, and reversed rows use its second half.
        """
        if dtype not in self._relative_rows:
            self._relative_rows[dtype] = tuple(self._build_rows(dtype))
        return self._relative_rows[dtype]

    @cached_property
    def _relative_rows(self) -> dict[torch.dtype, tuple[RelativeRow, ...]]:
        return {}

    def _build_rows(self, dtype: torch.dtype) -> Iterator[RelativeRow]:
        first, last = distance_range(self.batch, self.carried)
        ahead, backwards = max(self.batch.max_length - 1, 0), self.batch.reversed_rows
        second = [False] * self.tokens.row_count if backwards is None else backwards.tolist()
        positions = None if self._serves_content_stream else self._select_queries(self.batch.positions)
        for row, (queries, keys) in enumerate(zip(self.rows.bounds, self._key_rows.bounds, strict=True)):
            yield RelativeRow(
                slice(*queries),
                slice(*keys),
                origin=ahead + (last - first + 1 if second[row] else 0),
                at=None if positions is None else positions[slice(*queries)],
                hidden=None if self.batch.order is None else self._hidden_key_scores(row, queries, dtype),
            )

    def _hidden_key_scores(
        self, row: int, queries: tuple[int, int], dtype: torch.dtype
    ) -> Float[Tensor, "queries keys"]:
        """Return for one row [queries, keys], 0 where a query sees a key and `HIDDEN_KEY_SCORE` elsewhere."""
        visible_QK = self.visible[row, : queries[1] - queries[0]]
        keys = slice(*self._key_rows.bounds[row])
        visible_QK = visible_QK[:, : keys.stop - keys.start]
        return torch.zeros(visible_QK.shape, dtype=dtype).masked_fill_(~visible_QK, HIDDEN_KEY_SCORE)

    @cached_property
    def blind_queries(self) -> Bool[Tensor, " queries"] | None:
        """[M] bool, true for queries that see no key; None if every query sees a key."""
        if self._serves_content_stream or self.carried:
            return None
        return ~self.rows.unpad(self.visible.any(-1).expand(-1, self.rows.max_length))

    def _with_memory_keys(self, x: Int[Tensor, " tokens"], of_memory: int) -> Int[Tensor, " keys"]:
        """Return the values of all flat keys: those of tokens from `x`, those of memory `of_memory`."""
        return self.flat_keys(F.pad(self.tokens.pad(x), (self.carried, 0), value=of_memory))

    def flat_keys(self, x: Shaped[Tensor, "rows keys ..."]) -> Shaped[Tensor, "all_keys ..."]:
        """Remove the padding of keys: return for each row its memory, then its tokens."""
        return self._key_rows.unpad(x)

    @cached_property
    def _key_rows(self) -> Rows:
        """The rows of all keys: each row's memory, then its tokens."""
        edges = self.tokens.cu_seqlens
        first = edges + self.carried * torch.arange(len(edges), dtype=edges.dtype, device=edges.device)
        count = self.tokens.positions.numel() + self.tokens.row_count * self.carried
        starts = first[:-1].long().repeat_interleave(first.diff(), output_size=count)
        positions = torch.arange(count, device=edges.device) - starts
        return Rows(first, positions, self.tokens.max_length + self.carried)


def distance_range(batch: Batch, carried: int) -> tuple[int, int]:
    """Return the smallest and largest distance from key to query; in reversed rows distances change their sign."""
    ahead = max(batch.max_length - 1, 0)
    behind = ahead + carried
    return (-ahead, behind) if batch.reversed_rows is None else (-behind, behind)
