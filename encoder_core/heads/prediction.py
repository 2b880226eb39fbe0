"""Heads that predict token ids: masked tokens (BERT, and DeBERTa's enhanced mask decoder), permuted tokens (XLNet), and
spans from their boundaries (SpanBERT).

Shapes: T tokens, M targets (B for spans), H hidden, E embedding width, P position width, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.heads.cross_entropy import CrossEntropySums, linear_cross_entropy
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import activate
from encoder_core.layers.parameters import ScaledLinear
from encoder_core.layers.sizes import DECODER_PASSES, MAX_SPAN_TARGETS, SPAN_POSITION_WIDTH, Activation


class MaskedLanguageModelHead(nn.Module):
    """Linear, GELU, LayerNorm, then a decoder: a Linear to the vocabulary whose weight is the word embeddings, with a
    bias (BERT, section 3.1).

    It runs at target positions only. Without targets it runs on 0 rows, so that every parameter takes part in the
    backward pass on every rank.

    Args:
        bare: whether the head is only the decoder, as in decoder-only models, XLM and XLNet.
        inner: width between two Linears with activations, in place of Linear and LayerNorm (UltraBERT); None: no.
        tied: whether the decoder's weight is the word embeddings.
        bias: whether Linear and LayerNorm have biases.
    """

    def __init__(
        self,
        hidden: int,
        embedding: nn.Embedding,
        *,
        activation: Activation,
        eps: float,
        bias: bool = True,
        output_scale: float = 1.0,
        bare: bool = False,
        inner: int | None = None,
        decoder_bias: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.activation: Activation = activation
        self.dense = None if bare else ScaledLinear(hidden, inner or width, bias, scale=output_scale)
        self.second = None if inner is None else ScaledLinear(inner, width, bias, scale=output_scale)
        self.norm = None if bare or inner else nn.LayerNorm(width, eps=eps, bias=bias)
        self.decoder = nn.Linear(width, embedding.num_embeddings, bias=decoder_bias)
        if tied:
            self.decoder.weight = embedding.weight

    @property
    def decoder_norm(self) -> nn.LayerNorm | None:
        """The norm directly before the decoder; None if there is none."""
        return self.norm

    def features(self, hidden_MH: Float[Tensor, "targets hidden"]) -> Float[Tensor, "targets width"]:
        """Compute the decoder's input from hidden states."""
        features_ME = hidden_MH
        for linear in (self.dense, self.second):
            features_ME = features_ME if linear is None else activate(linear(features_ME), self.activation)
        return features_ME if self.norm is None else self.norm(features_ME)

    def logits(self, hidden_MH: Float[Tensor, "targets hidden"]) -> Float[Tensor, "targets vocab"]:
        """Return the logits of all ids, for filling masks and for comparisons; training never computes all at once."""
        logits_MV: Tensor = self.decoder(self.features(hidden_MH))
        return logits_MV

    def forward(
        self,
        hidden_TH: Float[Tensor, "tokens hidden"],
        positions_M: Int[Tensor, " targets"] | None,
        ids_M: Int[Tensor, " targets"],
        temperature: float | None = None,
        keys_M: Int[Tensor, " targets"] | None = None,
        weights_M: Float[Tensor, " targets"] | None = None,
    ) -> CrossEntropySums:
        """Return loss and correct predictions, summed over targets, and with a temperature a sampled id for each; see
        `linear_cross_entropy`. `positions_M`: indices of the targets' states; None: all states are targets'.
        """
        hidden_MH = hidden_TH if positions_M is None else hidden_TH.index_select(0, positions_M)
        features_ME = self.features(hidden_MH)
        return linear_cross_entropy(
            features_ME,
            self.decoder.weight,
            self.decoder.bias,
            ids_M,
            temperature=temperature,
            keys=keys_M,
            weights=weights_M,
        )


class EnhancedMaskDecoder(nn.Module):
    """The encoder's last layer, applied twice to queries with absolute positions.

    The first query is the state before the last layer plus an embedding of the absolute position; the second query is
    the result of the first. In both passes, keys and values come from the states before the last layer. The
    ordinary output of the last layer is not needed, and only targets are queries. So the layer runs twice over 15 % of
    the tokens, instead of three times over all.
    """

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Embedding(positions, hidden)

    def decode(
        self, encoder: DisentangledEncoder, x_TH: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> Float[Tensor, "targets hidden"]:
        """Return the decoder's states at `batch.target_positions`; M may be 0. `x_TH`: `encoder.last_layer_input`."""
        at_M = batch.target_positions
        queries_MH = x_TH.index_select(0, at_M) + self.position(batch.absolute_positions[at_M])
        return encoder.rerun_last_layer(queries_MH, at_M, x_TH, batch, times=DECODER_PASSES)


class SpanBoundaryHead(nn.Module):
    """Two blocks of Linear, GELU, LayerNorm on [state left of the span; state right of it; embedding of the target's
    position in the span], then a decoder (SpanBERT, section 3.2).

    The decoder's weight is the word embeddings; its bias is its own. The second Linear's output has the width of the
    embeddings, which in ALBERT and ELECTRA are narrower than the states.
    """

    def __init__(self, hidden: int, embedding: nn.Embedding, *, activation: Activation, eps: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.place = nn.Embedding(MAX_SPAN_TARGETS, SPAN_POSITION_WIDTH)
        self.first = nn.Linear(2 * hidden + SPAN_POSITION_WIDTH, hidden)
        self.first_norm = nn.LayerNorm(hidden, eps=eps)
        self.second = nn.Linear(hidden, embedding.embedding_dim)
        self.second_norm = nn.LayerNorm(embedding.embedding_dim, eps=eps)
        self.decoder = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
        self.decoder.weight = embedding.weight

    @property
    def decoder_norm(self) -> nn.LayerNorm:
        """The norm directly before the decoder."""
        return self.second_norm

    def forward(
        self,
        left_BH: Float[Tensor, "targets hidden"],
        right_BH: Float[Tensor, "targets hidden"],
        place_B: Int[Tensor, " targets"],
        ids_B: Int[Tensor, " targets"],
    ) -> CrossEntropySums:
        """Return loss and correct predictions, summed over targets; B may be 0. `place_B`: positions in the span."""
        x_BH = self.first(torch.cat((left_BH, right_BH, self.place(place_B)), -1))
        x_BH = self.first_norm(activate(x_BH, self.activation))
        features_BE = self.second_norm(activate(self.second(x_BH), self.activation))
        return linear_cross_entropy(features_BE, self.decoder.weight, self.decoder.bias, ids_B)
