"""ALBERT (Lan et al., 2019): a narrow factorised embedding, and layers that share their parameters."""

from typing import Literal, Self

from pydantic import Field
from torch import nn

from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings, Encoder


class AlbertConfig(WithGenerator):
    """See `EncoderConfig` and `WithGenerator`.

    Attributes:
        embedding: width of the embeddings, projected to `hidden`; the head works in it too.
        groups: distinct layers; depth i runs layer i * groups // layers. 1 shares one layer everywhere.
        token_types: segments told apart by an embedding.
    """

    family: Literal["albert"] = "albert"
    embedding: int = Field(default=128, gt=0)
    groups: int = Field(default=1, gt=0)
    token_types: int = Field(default=2, ge=1)

    @property
    def distinct_layers(self) -> int:
        return self.groups

    @property
    def generator(self) -> Self:
        """With as many distinct layers as its depth has room for."""
        shallow = super().generator
        return shallow.model_copy(update={"groups": min(self.groups, shallow.layers)})


def _size(layers: int, hidden: int, heads: int) -> AlbertConfig:
    return AlbertConfig(layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden, vocab=30_000)


BASE = _size(12, 768, 12)
LARGE = _size(24, 1024, 16)
XLARGE = _size(24, 2048, 16)
XXLARGE = _size(12, 4096, 64)


def build(
    config: AlbertConfig,
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
        encoder_layers(config, config.groups, lambda: attend),
        schedule=[depth * config.groups // config.layers for depth in range(config.layers)],
        projection=nn.Linear(config.embedding, config.hidden),
        checkpoint_activations=checkpoint_activations,
    )


def _embeddings(config: AlbertConfig) -> Embeddings:
    return Embeddings(
        config.vocabulary,
        config.embedding,
        positions=config.max_length,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )
