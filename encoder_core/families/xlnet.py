"""XLNet (Yang et al. 2019): permuted language modelling over a Transformer-XL."""

from typing import Literal, Self

from pydantic import Field, model_validator

from encoder_core.families.config import EncoderConfig
from encoder_core.layers.xlnet_attention import TwoStreamAttention
from encoder_core.layers.xlnet_encoder import Recurrence, TwoStreamEncoder, TwoStreamLayer


class XlnetConfig(EncoderConfig):
    """See `EncoderConfig`.

    Attributes:
        reuse: tokens at the start of each row that join the memory. The next row of the lane begins behind them.
        memory: tokens that each layer remembers; 0 for no recurrence.
        memory_refresh: steps after which memory is recomputed with the present weights, in training. Periodic
            checkpoints fall on these steps only. One refresh costs the forward passes of memory / reuse steps.
    """

    family: Literal["xlnet"] = "xlnet"
    pad_id: int = 5
    reuse: int = Field(default=256, ge=0)
    memory: int = Field(default=384, ge=0)
    memory_refresh: int = Field(default=100, gt=0)

    @model_validator(mode="after")
    def _memory_comes_from_somewhere(self) -> Self:
        if self.memory and not self.reuse:
            raise ValueError(f"memory ({self.memory}) needs tokens that join it: set reuse, or memory to 0")
        return self


BASE = XlnetConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=32_000, initializer="normal")
LARGE = XlnetConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=32_000, initializer="normal")


def build(config: XlnetConfig, *, checkpoint_activations: bool = False) -> TwoStreamEncoder:
    """The encoder, its weights not yet initialised. Raises ModelError if the vocabulary is unknown."""
    return TwoStreamEncoder(
        config.vocabulary,
        config.hidden,
        [_layer(config) for _ in range(config.layers)],
        recurrence=Recurrence(config.reuse, config.memory) if config.memory else None,
        dropout=config.dropout,
        checkpoint_activations=checkpoint_activations,
    )


def _layer(config: XlnetConfig) -> TwoStreamLayer:
    attention = TwoStreamAttention(
        config.hidden,
        config.heads,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
    )
    return TwoStreamLayer(
        attention,
        config.hidden,
        config.feed_forward,
        activation=config.activation,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )
