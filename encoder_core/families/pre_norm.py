"""What recent encoders share: norms before each block, rotary positions, gated feed-forward blocks, no biases."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from encoder_core.families.config import WithGenerator

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder, PreNormLayer
    from encoder_core.layers.residual import LayerNorm, RMSNorm


class PreNormConfig(WithGenerator):
    """The configuration of a pre-norm encoder. See `EncoderConfig` and `WithGenerator`.

    `feed_forward` is the width of each half of the gated block. No table limits the length of a row: `max_length` is
    the length that the model is trained for. A family overrides the properties in which it differs.

    Attributes:
        dropout: dropout rate of the embeddings and inside the feed-forward block.
        attention_output_dropout: dropout rate of attention's output, before it is added to the hidden states.
    """

    max_length: int = Field(default=8192, gt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_output_dropout: float = Field(default=0.0, ge=0, lt=1)
    layer_norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _heads_are_pairs(self) -> Self:
        if self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden / heads ({self.hidden // self.heads}) must be even: rotary positions turn pairs of numbers"
            )
        return self

    @property
    def biases(self) -> bool:
        return False

    @property
    def rms_norm(self) -> bool:
        """Whether norms are RMSNorms (Zhang and Sennrich, 2019), which neither centre nor shift; otherwise they are
        LayerNorms.
        """
        return False

    @property
    def embedding_norm(self) -> bool:
        """Whether a norm follows the embeddings; then there is none before the first layer's attention."""
        return True

    @property
    def fused(self) -> bool:
        """Whether query, key and value are one matrix, and likewise the two halves of the gated block."""
        return True

    @property
    def key_value_head_count(self) -> int:
        """Number of heads of keys and values."""
        return self.heads

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer sees on each side; None: the whole row."""
        return None

    @abstractmethod
    def rope_base(self, layer: int) -> float:
        """Return the base of a layer's rotary positions."""

    @abstractmethod
    def with_rope_base(self, base: float) -> Self:
        """Return the same model with another base in the layers that see the whole row."""

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether a norm precedes the attention of a layer."""
        return layer > 0 or not self.embedding_norm

    @property
    def has_length_limit(self) -> bool:
        return False

    @property
    def position_rows(self) -> int:
        return 0

    def encoder_weights(self) -> int:
        attention = 2 * self.hidden * (self.hidden + self.hidden // self.heads * self.key_value_head_count)
        norms = sum(1 + self.has_attention_norm(layer) for layer in range(self.layers)) + 1
        layers = self.layers * (attention + 3 * self.hidden * self.feed_forward)
        return self.embedding_weights() + layers + norms * self.hidden

    def encoder(
        self,
        *,
        embeddings: "Embeddings | None" = None,
        checkpoint_activations: bool = False,
        attend: "Attend | None" = None,
    ) -> "Encoder":
        from encoder_core.layers.encoder import Encoder

        return Encoder(
            embeddings or _embeddings(self),
            [_layer(self, layer, attend) for layer in range(self.layers)],
            final_norm=_norm(self),
            checkpoint_activations=checkpoint_activations,
        )


def _embeddings(config: PreNormConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=0,
        norm_bias=config.biases,
        eps=config.layer_norm_eps if config.embedding_norm else None,
        dropout=config.dropout,
    )


def _layer(config: PreNormConfig, layer: int, attend: "Attend | None") -> "PreNormLayer":
    from encoder_core.layers.attention import SelfAttention, automatic
    from encoder_core.layers.encoder import GatedFeedForward, PreNormLayer

    attention = SelfAttention(
        config.hidden,
        config.heads,
        config.attention_dropout,
        attend or automatic,
        bias=config.biases,
        fused=config.fused,
        key_value_heads=config.key_value_head_count,
        window=config.window(layer),
        rotary_base=config.rope_base(layer),
        output_scale=config.output_scale,
    )
    feed_forward = GatedFeedForward(
        config.hidden,
        config.feed_forward,
        config.activation,
        bias=config.biases,
        fused=config.fused,
        dropout=config.dropout,
        output_scale=config.output_scale,
    )
    return PreNormLayer(
        attention,
        feed_forward,
        attention_norm=_norm(config) if config.has_attention_norm(layer) else None,
        feed_forward_norm=_norm(config),
        dropout=config.attention_output_dropout,
    )


def _norm(config: PreNormConfig) -> "LayerNorm | RMSNorm":
    from encoder_core.layers.residual import LayerNorm, RMSNorm

    if config.rms_norm:
        return RMSNorm(config.hidden, eps=config.layer_norm_eps)
    return LayerNorm(config.hidden, eps=config.layer_norm_eps, bias=config.biases)
