"""DeBERTa's encoder: post-LayerNorm layers with disentangled attention, which share one table of relative positions.

Shapes: T tokens, M queries, H hidden.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.layers.deberta_attention import DisentangledAttention, Relations, RelativePositions
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.encoder import Embeddings, LayerStack, PostNormLayer, activate
from encoder_core.layers.rows import Rows
from encoder_core.layers.sizes import Activation


class DisentangledLayer(PostNormLayer):
    """A post-LayerNorm layer with disentangled attention."""

    attention: DisentangledAttention

    def forward(
        self,
        queries_MH: Float[Tensor, "queries hidden"] | None,
        x_TH: Float[Tensor, "tokens hidden"],
        relations: Relations,
        query_rows: Rows,
        rows: Rows,
    ) -> Float[Tensor, "queries hidden"]:
        """Return the layer's output at the queries, which see all tokens of their rows. `queries_MH` None: the tokens
        are the queries."""
        residual = x_TH if queries_MH is None else queries_MH
        context_MH = self.attention(queries_MH, x_TH, relations, query_rows, rows)
        draws = self.dropout.next_draw(), self.dropout.next_draw()
        return self.compute_after_attention(residual, context_MH, query_rows.random_keys, draws)


class Convolution(nn.Module):
    """A convolution over neighbouring embeddings, added to the first layer's output (DeBERTa v2 of width 1536)."""

    def __init__(self, hidden: int, kernel: int, *, activation: Activation, eps: float, dropout: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.convolution = nn.Conv1d(hidden, hidden, kernel, padding=kernel // 2)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(
        self, embedded_TH: Float[Tensor, "tokens hidden"], x_TH: Float[Tensor, "tokens hidden"], rows: Rows
    ) -> Float[Tensor, "tokens hidden"]:
        """Return norm(x + dropout(activation(convolution of the embeddings))); rows are padded with zeros.

        Raises:
            ModelError: the rows are causal.
        """
        if rows.causal:
            raise ModelError(
                "causal rows need a model without DeBERTa's convolution, which shows each token the next one",
                remedy="use rows that are not causal, or set model.convolution to null",
            )
        if rows.row_count:
            mixed_TH = rows.unpad(self.convolution(rows.pad(embedded_TH).transpose(1, 2)).transpose(1, 2))
        else:  # a convolution cannot run on rows of length 0; instead it runs on 0 rows of one token
            mixed_TH = self.convolution(embedded_TH[:, :, None]).squeeze(2)
        mixed_TH = self.dropout(mixed_TH, rows.random_keys)
        y_TH: Tensor = self.norm(x_TH + activate(mixed_TH, self.activation))
        return y_TH


class DisentangledEncoder(LayerStack):
    """Embeddings without absolute positions, and layers. `convolution`, if any, is applied after the first layer."""

    def __init__(
        self,
        embeddings: Embeddings,
        positions: RelativePositions,
        layers: Sequence[DisentangledLayer],
        *,
        convolution: Convolution | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.positions = positions
        self.layers = nn.ModuleList(layers)
        self.convolution = convolution

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's output."""
        for hidden_TH in self.states(batch):
            last_TH = hidden_TH
        return last_TH

    def states(self, batch: Batch) -> Iterator[Float[Tensor, "tokens hidden"]]:
        """Yield the hidden states: the embeddings, then the output of each layer."""
        embedded_TH: Tensor = self.embeddings(batch)
        yield embedded_TH
        rows = Rows.from_batch(batch)
        relations = self.positions.relate(batch.positions, rows, rows)
        x_TH = embedded_TH
        for depth in range(len(self.layers)):
            x_TH = self.run_layer(depth, None, x_TH, relations, rows, rows)
            if depth == 0 and self.convolution is not None:
                x_TH = self.convolution(embedded_TH, x_TH, rows)
            yield x_TH

    def states_at(
        self, at_M: Int[Tensor, " queries"], batch: Batch, max_per_row: int | None = None
    ) -> Float[Tensor, "queries hidden"]:
        """Return the last layer's output at sorted flat token indices `at_M`. The last layer runs on these
        tokens only, unless the encoder `ends_with_convolution`.

        `max_per_row`: largest number of these tokens in a row; see `rows_of_queries`.
        """
        if self.ends_with_convolution:
            return self.forward(batch).index_select(0, at_M)
        x_TH = self.last_layer_input(batch)
        return self.rerun_last_layer(x_TH.index_select(0, at_M), at_M, x_TH, batch, max_per_row=max_per_row)

    @property
    def ends_with_convolution(self) -> bool:
        """Whether the convolution, which needs whole rows, comes after the last layer."""
        return self.convolution is not None and len(self.layers) == 1

    def last_layer_input(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the input of the last layer."""
        return next(islice(self.states(batch), len(self.layers) - 1, None))

    def rerun_last_layer(
        self,
        queries_MH: Float[Tensor, "queries hidden"],
        at_M: Int[Tensor, " queries"],
        x_TH: Float[Tensor, "tokens hidden"],
        batch: Batch,
        *,
        times: int = 1,
        max_per_row: int | None = None,
    ) -> Float[Tensor, "queries hidden"]:
        """Apply the last layer `times` times to queries at sorted flat token indices `at_M`, which always attend to
        `x_TH`.

        `max_per_row`: largest number of queries in a row; see `rows_of_queries`.
        """
        rows = Rows.from_batch(batch)
        query_rows = rows_of_queries(at_M, batch, max_per_row)
        relations = self.positions.relate(batch.positions[at_M], rows, query_rows)
        last = len(self.layers) - 1
        for _ in range(times):
            queries_MH = self.run_layer(last, queries_MH, x_TH, relations, query_rows, rows)
        return queries_MH


def rows_of_queries(at_M: Int[Tensor, " queries"], batch: Batch, max_per_row: int | None = None) -> Rows:
    """Return the batch's rows (maybe empty), restricted to the queries at sorted flat token indices `at_M`.

    `max_per_row`: largest number of queries in a row. None: it is counted, which waits for the device unless the
    queries are the batch's targets.
    """
    edges = torch.searchsorted(at_M, batch.cu_seqlens.long())
    order = torch.arange(at_M.numel(), device=at_M.device)
    first = edges[:-1].repeat_interleave(edges.diff(), output_size=at_M.numel())
    if max_per_row is None and at_M is batch.target_positions:
        host = batch.on_host
        ends = np.searchsorted(host.target_positions.numpy(), host.cu_seqlens.numpy())
        max_per_row = int(np.diff(ends).max(initial=1))
    elif max_per_row is None:
        max_per_row = int(edges.diff().max()) if batch.rows else 1
    return Rows(edges.int(), order - first, max(1, max_per_row), batch, at_M)
