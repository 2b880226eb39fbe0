"""ModernBERT (Warner et al., 2024): pre-norm, rotary positions, GeGLU, no biases, local attention in most layers."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import nn

from encoder_core.families.config import WithGenerator
from encoder_core.layers.attention import Attend, SelfAttention, automatic
from encoder_core.layers.encoder import Embeddings, Encoder, GatedFeedForward, PreNormLayer


class ModernBertConfig(WithGenerator):
    """See `EncoderConfig` and `WithGenerator`. `feed_forward` is the width of each half of the gated block. A row's
    length is bounded by no table: `max_length` is what the model is trained for.

    Attributes:
        dropout: on the embeddings, and inside the feed-forward block.
        attention_output_dropout: on what attention adds to the hidden states.
        local_attention: tokens that a local layer's window holds, half of them on each side of the query.
        global_every: layers 0, this, twice this, ... see the whole row; the others are local.
        global_rope_base, local_rope_base: of the rotary positions of global and of local layers.
    """

    family: Literal["modernbert"] = "modernbert"
    max_length: int = Field(default=8192, gt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_output_dropout: float = Field(default=0.0, ge=0, lt=1)
    layer_norm_eps: float = Field(default=1e-5, gt=0)
    local_attention: int = Field(default=128, gt=0, multiple_of=2)
    global_every: int = Field(default=3, gt=0)
    global_rope_base: float = Field(default=160_000.0, gt=0)
    local_rope_base: float = Field(default=10_000.0, gt=0)

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
    def output_scale(self) -> float:
        """Megatron's (the paper, section 2.2.1)."""
        return math.sqrt(0.5 / self.layers)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees on each side; None: the whole row."""
        return self.local_attention // 2 if layer % self.global_every else None

    def rope_base(self, layer: int) -> float:
        return self.local_rope_base if layer % self.global_every else self.global_rope_base


BASE = ModernBertConfig(layers=22, hidden=768, heads=12, feed_forward=1152, vocab=50_368)
LARGE = ModernBertConfig(layers=28, hidden=1024, heads=16, feed_forward=2624, vocab=50_368)


def build(
    config: ModernBertConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> Encoder:
    """The encoder, on `embeddings` shared with another if given; its weights not yet initialised.

    Raises ModelError if the vocabulary is unknown.
    """
    return Encoder(
        embeddings or _embeddings(config),
        [_layer(config, layer, attend) for layer in range(config.layers)],
        final_norm=_norm(config),
        checkpoint_activations=checkpoint_activations,
    )


def _embeddings(config: ModernBertConfig) -> Embeddings:
    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=0,
        norm_bias=config.biases,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


def _layer(config: ModernBertConfig, layer: int, attend: Attend) -> PreNormLayer:
    attention = SelfAttention(
        config.hidden,
        config.heads,
        config.attention_dropout,
        attend,
        bias=config.biases,
        fused=True,
        window=config.window(layer),
        rotary_base=config.rope_base(layer),
        output_scale=config.output_scale,
    )
    feed_forward = GatedFeedForward(
        config.hidden,
        config.feed_forward,
        config.activation,
        bias=config.biases,
        dropout=config.dropout,
        output_scale=config.output_scale,
    )
    return PreNormLayer(
        attention,
        feed_forward,
        attention_norm=_norm(config) if layer else None,
        feed_forward_norm=_norm(config),
        dropout=config.attention_output_dropout,
    )


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden, eps=config.layer_norm_eps, bias=config.biases)
