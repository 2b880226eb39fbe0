"""DeBERTa (He et al. 2021): disentangled attention; v2 and v3 share its projections and bucket its distances."""

from typing import Literal

from pydantic import Field

from encoder_core.families.config import EncoderConfig, WithGenerator
from encoder_core.layers.deberta_attention import (
    AttendDisentangled,
    DisentangledAttention,
    FusedProjections,
    SharedProjections,
    automatic,
)
from encoder_core.layers.deberta_encoder import Convolution, DisentangledEncoder, DisentangledLayer
from encoder_core.layers.deberta_positions import RelativePositions
from encoder_core.layers.encoder import Embeddings, FeedForward


class DebertaConfig(WithGenerator):
    """The first version. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        mask_decoder: enhanced lets absolute positions in before the prediction, as the paper does; plain predicts
            from the last layer, as transformers' classes do.
        position_to_position: adds to the attention scores the term between relative positions, which the paper names
            and leaves out. transformers' classes have no such term, so such a model cannot be exported.
    """

    family: Literal["deberta"] = "deberta"
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False


class DebertaV2Config(EncoderConfig):
    """The second version, and the third, which has the second's encoder.

    Attributes:
        mask_decoder, position_to_position: see `DebertaConfig`.
        buckets: rows of the position table each way.
        convolution: width of the convolution beside the first layer; None for none.
        generator_layers: depth of the generator (version 3), otherwise as this network; None for half the depth.
    """

    family: Literal["deberta_v2"] = "deberta_v2"
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False
    buckets: int = Field(default=256, ge=2, multiple_of=2)
    convolution: Literal[3] | None = None
    generator_layers: int | None = Field(default=None, gt=0)

    @property
    def generator(self) -> "DebertaV2Config":
        """The generator, as a model in its own right: as wide, half as deep (DeBERTaV3, section 3.1)."""
        layers = self.generator_layers or max(1, self.layers // 2)
        return self.model_copy(update={"layers": layers, "generator_layers": None})


BASE = DebertaConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=50_265, initializer="normal")
LARGE = DebertaConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal")
XLARGE = DebertaConfig(
    layers=48, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal"
)

V2_XLARGE = DebertaV2Config(
    layers=24, hidden=1536, heads=24, feed_forward=6144, vocab=128_100, convolution=3, initializer="normal"
)
V2_XXLARGE = V2_XLARGE.model_copy(update={"layers": 48})

V3_XSMALL = DebertaV2Config(
    layers=12, hidden=384, heads=6, feed_forward=1536, vocab=128_100, initializer="normal"
)
V3_SMALL = DebertaV2Config(
    layers=6, hidden=768, heads=12, feed_forward=3072, vocab=128_100, initializer="normal"
)
V3_BASE = V3_SMALL.model_copy(update={"layers": 12})
V3_LARGE = DebertaV2Config(
    layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=128_100, initializer="normal"
)


def build(
    config: DebertaConfig | DebertaV2Config,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: AttendDisentangled = automatic,
) -> DisentangledEncoder:
    """The encoder, on `embeddings` shared with another if given; its weights not yet initialised.

    Raises ModelError if the vocabulary is unknown.
    """
    return DisentangledEncoder(
        embeddings or _embeddings(config),
        _positions(config),
        [_layer(config, attend) for _ in range(config.layers)],
        convolution=_convolution(config),
        checkpoint_activations=checkpoint_activations,
    )


def _embeddings(config: DebertaConfig | DebertaV2Config) -> Embeddings:
    return Embeddings(
        config.vocabulary, config.hidden, positions=0, eps=config.layer_norm_eps, dropout=config.dropout
    )


def _positions(config: DebertaConfig | DebertaV2Config) -> RelativePositions:
    buckets = config.buckets if isinstance(config, DebertaV2Config) else None
    return RelativePositions(
        config.max_length, config.hidden, buckets=buckets, norm=buckets is not None, eps=config.layer_norm_eps
    )


def _layer(config: DebertaConfig | DebertaV2Config, attend: AttendDisentangled) -> DisentangledLayer:
    projections = SharedProjections if isinstance(config, DebertaV2Config) else FusedProjections
    attention = DisentangledAttention(
        projections(config.hidden, config.heads),
        config.hidden,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        position_to_position=config.position_to_position,
        attend=attend,
    )
    return DisentangledLayer(
        attention,
        FeedForward(config.hidden, config.feed_forward, config.activation),
        config.hidden,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


def _convolution(config: DebertaConfig | DebertaV2Config) -> Convolution | None:
    if not isinstance(config, DebertaV2Config) or config.convolution is None:
        return None
    return Convolution(
        config.hidden,
        config.convolution,
        activation=config.activation,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )
