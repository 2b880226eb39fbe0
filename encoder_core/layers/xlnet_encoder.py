"""XLNet's encoder: Transformer-XL layers with recurrence, for the content stream alone or for both streams.

Shapes: T tokens, M targets, H hidden; R rows, L longest row, C memory tokens, K = C + L keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.layers.deberta_encoder import rows_of_queries
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.encoder import Embeddings, LayerStack, activate
from encoder_core.layers.parameters import Weights
from encoder_core.layers.pieces import DropoutDraws, PieceWise, piece
from encoder_core.layers.residual import LayerNorm, normed_sum
from encoder_core.layers.rows import Rows
from encoder_core.layers.sizes import Activation, Recurrence
from encoder_core.layers.xlnet_attention import TwoStreamAttention, sinusoids
from encoder_core.layers.xlnet_scope import AttentionScope, distance_range
from encoder_core.random_draws import table_keys

Memory = tuple[Tensor, ...]
"""For each layer, [R, C, H]: the layer's inputs at the tokens before these rows, without gradient."""


@dataclass(frozen=True)
class Streams:
    """The states of both streams.

    Attributes:
        content: [T, H], states of the content stream.
        query: [M, H], states of the query stream at the batch's targets; None if the batch has no factorisation order.
        memory: memory to pass with the next rows, which continue these; empty without recurrence.
    """

    content: Float[Tensor, "tokens hidden"]
    query: Float[Tensor, "targets hidden"] | None
    memory: Memory


class TwoStreamLayer(PieceWise):
    """Attention and feed-forward. Both streams use the same weights."""

    def __init__(
        self,
        attention: TwoStreamAttention,
        hidden: int,
        inner: int,
        *,
        activation: Activation,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.attention = attention
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        content_TH: Float[Tensor, "tokens hidden"],
        query_MH: Float[Tensor, "targets hidden"] | None,
        carried_RCH: Float[Tensor, "rows carried hidden"] | None,
        table_PH: Float[Tensor, "distances hidden"],
        scopes: tuple[AttentionScope, AttentionScope | None],
    ) -> tuple[Tensor, Tensor | None]:
        of_content, of_query = scopes
        content_RKH = of_content.rows.pad(content_TH)
        if carried_RCH is not None:
            content_RKH = torch.cat([carried_RCH, content_RKH], dim=1)
        keys = self.attention.project_keys_and_values(content_RKH)
        distances_NPD = self.attention.distance(table_PH).transpose(0, 1)
        content_TH = self._run_stream(content_TH, keys, distances_NPD, of_content)
        if query_MH is not None and of_query is not None:
            query_MH = self._run_stream(query_MH, keys, distances_NPD, of_query)
        return content_TH, query_MH

    def _run_stream(
        self, x_MH: Tensor, keys: tuple[Tensor, Tensor], distances_NPD: Tensor, scope: AttentionScope
    ) -> Tensor:
        context_MND = self.attention(x_MH, keys, distances_NPD, scope)
        draws = self.attention.dropout.next_draw(), self.dropout.next_draw(), self.dropout.next_draw()
        return self.compute_after_attention(x_MH, context_MND, scope.rows.random_keys, draws)

    @piece
    def compute_after_attention(self, x_MH: Tensor, context_MND: Tensor, keys_M: Tensor, draws: DropoutDraws) -> Tensor:
        """Compute what follows the attention kernel, for either stream; return the layer's output."""
        attention = self.attention
        attended_MH = attention.output(context_MND)
        y_MH = normed_sum(attention.norm, x_MH, attended_MH, attention.dropout, keys_M, draws[0])
        inner_MF = self.dropout.apply_draw(draws[1], activate(self.up(y_MH), self.activation), keys_M)
        return normed_sum(self.norm, y_MH, self.down(inner_MF), self.dropout, keys_M, draws[2])


class TwoStreamEncoder(LayerStack):
    """XLNet's encoder: word embeddings and two-stream layers. The query stream starts from one learned vector.

    With `recurrence` the encoder has memory.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        layers: Sequence[TwoStreamLayer],
        *,
        recurrence: Recurrence | None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.mask = Weights(1, 1, embeddings.word.embedding_dim)
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)
        self.recurrence = recurrence

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the content stream's last states, computed without memory, as fine-tuning uses them."""
        return self.streams(batch).content

    def streams(self, batch: Batch, memory: Memory | None = None) -> Streams:
        """Return the last states of both streams. A batch without a factorisation order has only the content stream,
        which sees every token.

        `memory`: returned for the rows that these rows continue; () for the first rows. None: memory is neither used
        nor returned.

        Raises:
            ModelError: `memory` has another number of rows or layers, a row has fewer than `recurrence.reuse` tokens,
                or rows are causal.
        """
        last = self.states(batch, memory)[-1]
        query = None if last.query is None else self.dropout(last.query, _target_keys(batch))
        return replace(last, content=self.dropout(last.content, batch.random_keys), query=query)

    def states(self, batch: Batch, memory: Memory | None = None) -> list[Streams]:
        """Return the states of both streams: the embeddings, then the output of each layer, before the final dropout.
        The last one has the memory of all layers.
        """
        recurrence = self.recurrence if memory is not None and batch.rows else None
        memory = memory or ()
        self._ensure_fits_memory(batch, memory, recurrence)
        content_TH: Tensor = self.embeddings(batch)
        query_MH = None
        if batch.order is not None:
            mask_1H: Tensor = self.mask().view(1, -1)
            query_MH = self.dropout(mask_1H.expand(batch.target_positions.numel(), -1), _target_keys(batch))
        sights = self._scopes(batch, memory[0].shape[1] if memory else 0)
        table_PH = self._distance_table(batch, memory).to(content_TH.dtype)
        streams, carried = [Streams(content_TH, query_MH, ())], []
        for depth in range(len(self.layers)):
            before = memory[depth] if memory else None
            if recurrence is not None:
                carried.append(_next_memory(recurrence, before, sights[0].rows.pad(content_TH)))
            content_TH, query_MH = self.run_layer(depth, content_TH, query_MH, before, table_PH, sights)
            streams.append(Streams(content_TH, query_MH, tuple(carried)))
        return streams

    def _distance_table(self, batch: Batch, memory: Memory) -> Tensor:
        first, last = distance_range(batch, memory[0].shape[1] if memory else 0)
        device = batch.tokens.device
        table_PH = sinusoids(first, last, self.embeddings.word.embedding_dim, device)
        return self.dropout(table_PH, table_keys(first, last + 1, device))  # type: ignore[no-any-return]

    def _scopes(self, batch: Batch, carried: int) -> tuple[AttentionScope, AttentionScope | None]:
        """Return the scopes of the content stream and, if the batch has a factorisation order, of the query stream."""
        rows = Rows.from_batch(batch)
        content = AttentionScope(batch, rows, rows, carried)
        if batch.order is None:
            return content, None
        return content, AttentionScope(batch, rows, rows_of_queries(batch.target_positions, batch), carried)

    def _ensure_fits_memory(self, batch: Batch, memory: Memory, recurrence: Recurrence | None) -> None:
        if batch.causal:
            raise ModelError(
                "XLNet cannot read causal rows: its streams see tokens in factorisation order, not in text order",
                remedy="use rows that are not causal, or a model of another family",
            )
        if memory and (len(memory) != len(self.layers) or len(memory[0]) != batch.rows):
            raise ModelError(
                f"the memory has {len(memory)} layers and {len(memory[0])} rows, but the model has "
                f"{len(self.layers)} layers and the batch has {batch.rows} rows",
                remedy="pass the memory that was returned for the rows that these rows continue, or pass None",
            )
        if recurrence is not None and int(np.diff(batch.on_host.cu_seqlens.numpy()).min()) < recurrence.reuse:
            raise ModelError(
                f"a row has fewer than the {recurrence.reuse} tokens (model.reuse) that are appended to the memory",
                remedy="use rows of one length, at least model.reuse, or set model.memory to 0",
            )


def _target_keys(batch: Batch) -> Tensor:
    """Return each target's key for random draws."""
    return batch.random_keys.index_select(0, batch.target_positions)


@torch.no_grad()
def _next_memory(recurrence: Recurrence, previous: Tensor | None, content_RLH: Tensor) -> Tensor:
    """Return a layer's next memory: the last `length` states of `previous` and the first `reuse` of each new row."""
    fresh = content_RLH[:, : recurrence.reuse]
    joined = fresh if previous is None else torch.cat([previous, fresh], dim=1)
    return joined[:, -recurrence.length :].detach().clone()
