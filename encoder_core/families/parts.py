"""Parts that several families put together the same way."""

from collections.abc import Callable

from encoder_core.families.config import EncoderConfig
from encoder_core.layers.attention import Attend, SelfAttention
from encoder_core.layers.encoder import EncoderLayer, FeedForward


def encoder_layers(config: EncoderConfig, count: int, kernel: Callable[[], Attend]) -> list[EncoderLayer]:
    """`count` post-LayerNorm layers of the configuration's shape, each with a `kernel()` of its own."""
    return [
        EncoderLayer(
            SelfAttention(config.hidden, config.heads, config.attention_dropout, kernel()),
            FeedForward(config.hidden, config.feed_forward, config.activation),
            config.hidden,
            eps=config.layer_norm_eps,
            dropout=config.dropout,
        )
        for _ in range(count)
    ]
