"""Cross-attention from a decoder's to an encoder's flat tokens, and the autoregressive decoder that uses it.

The decoder's row i attends to the whole row i of the encoder, whose length may differ. Kernels: `attention.py`.

Shapes: T tokens of the decoder, S of the encoder, R rows, H hidden, N heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.attention import SelfAttention, attend_with_best_kernel
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.encoder import Embeddings, FeedForward, LayerStack
from encoder_core.layers.parameters import project
from encoder_core.layers.pieces import DropoutDraws, PieceWise, piece
from encoder_core.layers.residual import LayerNorm, normed_sum
from encoder_core.layers.rows import Rows

EncoderHeads = Float[Tensor, "others heads width"]  # keys or values of the encoder's tokens


class CrossAttention(nn.Module):
    """Attention to an encoder's states, with its projections ("Attention Is All You Need", section 3.2.3)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width = hidden // heads
        self.dropout = dropout
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))

    def project_keys_and_values(self, encoder_SH: Float[Tensor, "others hidden"]) -> tuple[EncoderHeads, EncoderHeads]:
        """Return keys and values, [S, N, D] each, of an encoder's states."""
        k_SH, v_SH = project(encoder_SH, (self.key, self.value))
        return torch.unflatten(k_SH, -1, (-1, self.width)), torch.unflatten(v_SH, -1, (-1, self.width))

    def forward(
        self,
        q_TH: Float[Tensor, "tokens hidden"],
        heads: tuple[EncoderHeads, EncoderHeads],
        rows: Rows,
        encoder_rows: Rows,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the kernel's context; the layer then applies `output`. `q_TH`: projected queries. `heads`: keys and
        values (`project_keys_and_values`), in rows `encoder_rows`.
        """
        q_TND = torch.unflatten(q_TH, -1, (-1, self.width))
        dropout = self.dropout if self.training else 0.0
        return attend_with_best_kernel(q_TND, *heads, rows, dropout, None, encoder_rows).flatten(-2)


class DecoderLayer(PieceWise):
    """Causal self-attention, cross-attention and feed-forward, each followed by dropout, residual sum and LayerNorm
    ("Attention Is All You Need", section 3.1).
    """

    def __init__(
        self,
        attention: SelfAttention,
        across: CrossAttention,
        feed_forward: FeedForward,
        hidden: int,
        *,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = LayerNorm(hidden, eps=eps)
        self.across = across
        self.across_norm = LayerNorm(hidden, eps=eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x_TH: Float[Tensor, "tokens hidden"],
        rows: Rows,
        encoder_SH: Float[Tensor, "others hidden"],
        encoder_rows: Rows,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states after the layer. `encoder_SH`: the encoder's states, in the rows `encoder_rows`."""
        context_TH = self.attention(self.attention.project_heads(x_TH, None), rows)
        draws = self.dropout.next_draw(), self.dropout.next_draw(), self.dropout.next_draw()
        y_TH, q_TH = self.compute_between_kernels(x_TH, context_TH, rows.random_keys, draws[:1])
        found_TH = self.across(q_TH, self.across.project_keys_and_values(encoder_SH), rows, encoder_rows)
        return self.compute_after_kernels(y_TH, found_TH, rows.random_keys, draws[1:])

    @piece
    def compute_between_kernels(
        self, x_TH: Tensor, context_TH: Tensor, keys_T: Tensor, draws: DropoutDraws
    ) -> tuple[Tensor, Tensor]:
        """Compute what lies between the layer's two attention kernels; return states, and queries of the second."""
        attended_TH = self.attention.output(context_TH)
        y_TH = normed_sum(self.attention_norm, x_TH, attended_TH, self.dropout, keys_T, draws[0])
        return y_TH, self.across.query(y_TH)

    @piece
    def compute_after_kernels(self, y_TH: Tensor, found_TH: Tensor, keys_T: Tensor, draws: DropoutDraws) -> Tensor:
        """Compute what follows the layer's second attention kernel; return the layer's output."""
        z_TH = normed_sum(self.across_norm, y_TH, self.across.output(found_TH), self.dropout, keys_T, draws[0])
        inner_TH = self.feed_forward(z_TH)
        return normed_sum(self.feed_forward_norm, z_TH, inner_TH, self.dropout, keys_T, draws[1])


class Decoder(LayerStack):
    """Embeddings and layers of an autoregressive decoder ("Attention Is All You Need", section 3.1)."""

    def __init__(self, embeddings: Embeddings, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)

    def forward(
        self, batch: Batch, encoder_SH: Float[Tensor, "others hidden"], encoder_batch: Batch
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's output, in which the state at each token predicts that token: inputs are shifted
        (`shift_right`).

        Args:
            batch: the rows to predict.
            encoder_SH: the encoder's states.
            encoder_batch: the encoder's rows, as many as those of `batch`.
        """
        inputs = shift_right(batch)
        rows, others = Rows.from_batch(inputs), Rows.from_batch(encoder_batch)
        x_TH: Tensor = self.embeddings(inputs)
        for index in range(len(self.layers)):
            x_TH = self.run_layer(index, x_TH, rows, encoder_SH, others)
        return x_TH


def shift_right(batch: Batch) -> Batch:
    """Return causal rows, each token replaced by the previous one, the first by `</s>` (fairseq,
    `move_eos_to_beginning`)."""
    before_T = torch.arange(len(batch.tokens), device=batch.tokens.device) - 1
    starts_R, stops_R = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    before_T = before_T.index_copy(0, starts_R, stops_R - 1)
    return replace(batch, tokens=batch.tokens[before_T], causal=True, corrupted=None)
