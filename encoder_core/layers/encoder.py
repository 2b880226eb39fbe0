"""A Transformer encoder and its parts: embeddings, feed-forward blocks, layers.

`EncoderLayer` normalises after each block (BERT and similar families), `PreNormLayer` before it
(`families/pre_norm.py`).

Shapes: T tokens, E embedding width, H hidden, F inner width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoder_core.batch import Batch
from encoder_core.layers.attention import SelfAttention
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.parameters import JoinedLinear, ScaledLinear
from encoder_core.layers.pieces import DropoutDraws, PieceWise, piece
from encoder_core.layers.residual import LayerNorm, normed_sum, sum_and_norm
from encoder_core.layers.rows import Rotation, Rows
from encoder_core.layers.sizes import Activation


class DifferenceEmbedding(nn.Embedding):
    """An embedding table stop_gradient(base) + weight, where `base` is another table and `weight` begins at zero.

    This is gradient-disentangled embedding sharing (DeBERTaV3: He et al. 2021, section 3.2).
    """

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim)
        self.base = base

    def forward(self, ids_T: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        base_TE: Tensor = self.base(ids_T)
        return base_TE.detach() + super().forward(ids_T)


class Embeddings(nn.Module):
    """Sum of word, position and (if the model has them) token-type and language embeddings, then LayerNorm and dropout.

    Args:
        positions: rows of the position table; 0: no table, for models with relative positions only.
        first_position: row of the position table for the first token: 0 for BERT; the padding id + 1 for RoBERTa,
            whose published table has unused rows before it.
        padding: row of the word and position tables that is initialised to zero; None: no such row.
        eps: epsilon of the LayerNorm; None: no LayerNorm.
        word: word table to share with another network; None: a new table.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        positions: int,
        first_position: int = 0,
        token_types: int = 0,
        languages: int = 0,
        padding: int | None = None,
        norm_bias: bool = True,
        eps: float | None,
        dropout: float,
        word: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.first_position = first_position
        self.word = nn.Embedding(vocab, width, padding_idx=padding) if word is None else word
        self.position = nn.Embedding(positions, width, padding_idx=padding) if positions else None
        self.token_type = nn.Embedding(token_types, width) if token_types else None
        self.language = nn.Embedding(languages, width) if languages else None
        self.norm = nn.Identity() if eps is None else nn.LayerNorm(width, eps=eps, bias=norm_bias)
        self.dropout = Dropout(dropout)

    def disentangle_from(self, other: "Embeddings") -> None:
        """Replace every table by a `DifferenceEmbedding` of the same table of `other`. LayerNorms are not shared."""
        self.word = DifferenceEmbedding(other.word)
        if other.position is not None:
            self.position = DifferenceEmbedding(other.position)
        if other.token_type is not None:
            self.token_type = DifferenceEmbedding(other.token_type)
        if other.language is not None:
            self.language = DifferenceEmbedding(other.language)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens width"]:
        """Embed the tokens. Without `batch.segments` all tokens are in segment 0; without `batch.languages` no language
        embedding is added.
        """
        x_TE = self.word(batch.tokens)
        if self.token_type is not None:
            segments = batch.segments if batch.segments is not None else torch.zeros_like(batch.tokens)
            x_TE = x_TE + self.token_type(segments)
        if self.position is not None:
            x_TE = x_TE + self.position(batch.absolute_positions + self.first_position)
        if self.language is not None and batch.languages is not None:
            x_TE = x_TE + self.language(batch.languages)
        embedded_TE: Tensor = self.dropout(self.norm(x_TE), batch.random_keys)
        return embedded_TE


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "..."]:
    """Apply the activation function of this name."""
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
        case _:
            assert_never(activation)


class FeedForward(nn.Module):
    """Feed-forward block: Linear, activation, Linear ("Attention Is All You Need", section 3.3)."""

    def __init__(self, hidden: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        y_TH: Tensor = self.down(activate(self.up(x_TH), self.activation))
        return y_TH


class GatedFeedForward(nn.Module):
    """Gated feed-forward block: activation(a) * b, dropout, Linear. With GELU it is GeGLU, with SiLU SwiGLU (Shazeer,
    2020, "GLU Variants Improve Transformer").

    a and b, of width `inner` each, are outputs of two Linears or, with `fused`, the halves of one Linear's output. No
    Linear has a bias.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        activation: Activation,
        *,
        dropout: float,
        fused: bool = True,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate = None if fused else nn.Linear(hidden, inner, False)
        self.up = JoinedLinear(hidden, (inner, inner), False) if fused else nn.Linear(hidden, inner, False)
        self.dropout = Dropout(dropout)
        self.down = ScaledLinear(inner, hidden, False, scale=output_scale)

    def forward(
        self,
        x_TH: Float[Tensor, "tokens hidden"],
        keys_T: Int[Tensor, " tokens"],
        draw: Int[Tensor, ""] | None,
    ) -> Float[Tensor, "tokens hidden"]:
        """Apply the block. `keys_T`: each token's key for random draws. `draw`: from `self.dropout.next_draw`."""
        gate_TF, value_TF = self.up(x_TH).chunk(2, -1) if self.gate is None else (self.gate(x_TH), self.up(x_TH))
        inner_TF = activate(gate_TF, self.activation) * value_TF
        y_TH: Tensor = self.down(self.dropout.apply_draw(draw, inner_TF, keys_T))
        return y_TH


class PostNormLayer(PieceWise):
    """Attention and feed-forward, each followed by dropout, residual sum and LayerNorm (BERT, section 3)."""

    def __init__(
        self, attention: nn.Module, feed_forward: FeedForward, hidden: int, *, eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = LayerNorm(hidden, eps=eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    @piece
    def compute_after_attention(self, x_MH: Tensor, context_MH: Tensor, keys_M: Tensor, draws: DropoutDraws) -> Tensor:
        """Compute what follows the attention kernel, for the kernel's queries; return the layer's output."""
        attended_MH = self.attention.output(context_MH)  # type: ignore[operator]
        y_MH = normed_sum(self.attention_norm, x_MH, attended_MH, self.dropout, keys_M, draws[0])
        inner_MH = self.feed_forward(y_MH)
        return normed_sum(self.feed_forward_norm, y_MH, inner_MH, self.dropout, keys_M, draws[1])


class EncoderLayer(PostNormLayer):
    """A post-LayerNorm layer with self-attention."""

    attention: SelfAttention

    def forward(self, x_TH: Float[Tensor, "tokens hidden"], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        heads = self.attention.project_heads(x_TH, self.attention.rotation(rows))
        context_TH = self.attention(heads, rows)
        draws = self.dropout.next_draw(), self.dropout.next_draw()
        return self.compute_after_attention(x_TH, context_TH, rows.random_keys, draws)


class PreNormLayer(PieceWise):
    """Attention and feed-forward, each applied to normalised states and added to the states (Xiong et al., 2020).

    If `attention_norm` is None, attention takes unnormalised states (ModernBERT's first layer, which follows the
    LayerNorm of the embeddings). `dropout` acts on attention's output.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: GatedFeedForward,
        *,
        attention_norm: nn.Module | None,
        feed_forward_norm: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        heads = self.compute_before_attention(x_TH, self.attention.rotation(rows))
        context_TH = self.attention(heads, rows)
        draws = self.dropout.next_draw(), self.feed_forward.dropout.next_draw()
        return self.compute_after_attention(x_TH, context_TH, rows.random_keys, draws)

    @piece
    def compute_before_attention(self, x_TH: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise the states, and return queries, keys and values for the attention kernel."""
        normed_TH = x_TH if self.attention_norm is None else self.attention_norm(x_TH)
        return self.attention.project_heads(normed_TH, rotation)

    @piece
    def compute_after_attention(self, x_TH: Tensor, context_TH: Tensor, keys_T: Tensor, draws: DropoutDraws) -> Tensor:
        """Compute what follows the attention kernel; return the layer's output."""
        attended_TH = self.attention.output(context_TH)
        y_TH, normed_TH = sum_and_norm(self.feed_forward_norm, x_TH, attended_TH, self.dropout, keys_T, draws[0])
        z_TH: Tensor = y_TH + self.feed_forward(normed_TH, keys_T, draws[1])
        return z_TH


class LayerStack(nn.Module):
    """Base of modules with a stack of layers. With `checkpoint_activations` each layer saves only its inputs and is
    recomputed in the backward pass, with the same dropout.
    """

    layers: nn.ModuleList
    checkpoint_activations: bool = False

    def run_layer(self, index: int, *inputs: Any) -> Any:
        """Run layer `index` on `inputs`, with activation checkpointing if it is on."""
        if self.checkpoint_activations and self.training:
            return checkpoint(self.layers[index], *inputs, use_reentrant=False)
        return self.layers[index](*inputs)


def checkpoint_activations(module: nn.Module) -> None:
    """Turn on activation checkpointing for the layers of all stacks in `module`."""
    for part in module.modules():
        if isinstance(part, LayerStack):
            part.checkpoint_activations = True


class Encoder(LayerStack):
    """Embeddings, a projection to the hidden width if it differs, and layers.

    `schedule`: index of the layer to run at each depth: (0, 1, 2, ...) without sharing, (0, 0, 0, ...) if all depths
    share one layer. `final_norm` acts on the last layer's output.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        layers: Sequence[EncoderLayer | PreNormLayer],
        *,
        schedule: Sequence[int],
        projection: nn.Linear | None,
        final_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.projection = projection
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.schedule = schedule

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's output, after the final norm if there is one."""
        for hidden_TH in self.states(batch):
            last_TH = hidden_TH
        return last_TH

    def states(self, batch: Batch) -> Iterator[Float[Tensor, "tokens hidden"]]:
        """Yield the hidden states: the (projected) embeddings, then the output of each layer. `final_norm` acts on the
        last output only.
        """
        x_TH: Tensor = self.embeddings(batch)
        if self.projection is not None:
            x_TH = self.projection(x_TH)
        yield x_TH
        rows = Rows.from_batch(batch)
        for index in self.schedule[:-1]:
            x_TH = self.run_layer(index, x_TH, rows)
            yield x_TH
        x_TH = self.run_layer(self.schedule[-1], x_TH, rows)
        yield x_TH if self.final_norm is None else self.final_norm(x_TH)
