"""ELECTRA (Clark et al., 2020): BERT's encoder twice, the generator narrower, on one set of embeddings."""

from typing import Literal

from pydantic import Field
from torch import nn

from encoder_core.families.config import EncoderConfig, encoder_layers
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Activation, Embeddings, Encoder


class ElectraConfig(EncoderConfig):
    """The discriminator. See `EncoderConfig`.

    Attributes:
        embedding: width of the embeddings; projected wherever an encoder's width differs.
        token_types: segments told apart by an embedding.
        generator_divisor: the generator's width, heads and inner width are the discriminator's divided by this.
    """

    family: Literal["electra"] = "electra"
    embedding: int = Field(default=128, gt=0)
    token_types: int = Field(default=2, ge=1)
    generator_divisor: int = Field(default=4, ge=1)

    @property
    def head_activation(self) -> Activation:
        """Always the exact GELU, which is all that transformers' class for the generator's head knows."""
        return "gelu"

    @property
    def generator(self) -> "ElectraConfig":
        """The generator, as a model in its own right: same depth and embeddings, the rest divided."""
        divisor = self.generator_divisor
        shape = {
            "hidden": self.hidden // divisor,
            "heads": max(1, self.heads // divisor),
            "feed_forward": self.feed_forward // divisor,
            "generator_divisor": 1,
        }
        return ElectraConfig.model_validate(self.model_dump() | shape)


def _size(layers: int, hidden: int, embedding: int, generator_divisor: int) -> ElectraConfig:
    return ElectraConfig(
        layers=layers,
        hidden=hidden,
        heads=hidden // 64,
        feed_forward=4 * hidden,
        embedding=embedding,
        generator_divisor=generator_divisor,
        vocab=30_522,
    )


SMALL = _size(12, 256, 128, 4)
BASE = _size(12, 768, 768, 3)
LARGE = _size(24, 1024, 1024, 4)


def build(
    config: ElectraConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> Encoder:
    """One encoder, on `embeddings` shared with another if given; its weights not yet initialised.

    Raises ModelError if the vocabulary is unknown.
    """
    return Encoder(
        embeddings or _embeddings(config),
        encoder_layers(config, config.layers, lambda: attend),
        projection=nn.Linear(config.embedding, config.hidden) if config.embedding != config.hidden else None,
        checkpoint_activations=checkpoint_activations,
    )


def _embeddings(config: ElectraConfig) -> Embeddings:
    return Embeddings(
        config.vocabulary,
        config.embedding,
        positions=config.max_length,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )
