"""ELECTRA (Clark et al., 2020, arXiv 2003.10555): distinguishes replaced tokens from original ones.

A small generator fills masks, and the discriminator predicts for every token whether it was replaced. So it learns
from all tokens, not from 15 % (section 2). Both are BERT's encoder on shared embeddings; the generator is narrower
(section 3.2).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from encoder_core.families.config import EncoderConfig, SmallForm, encoder_layers
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)
from encoder_core.layers.sizes import Activation

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder


class ElectraConfig(EncoderConfig):
    """The configuration of the discriminator. See `EncoderConfig`.

    Attributes:
        embedding: width of the embeddings, projected where an encoder's width differs.
        token_types: number of segments with an embedding of their own.
        generator_divisor: factor by which the generator's width, heads and inner width are smaller than the
            discriminator's.
    """

    family: Literal["electra"] = "electra"
    name: ClassVar[str] = "ELECTRA"
    recipe: ClassVar[str] = "electra-base"
    main_heads: ClassVar[Heads] = "rtd"
    embedding: int = Field(default=128, gt=0)
    token_types: int = Field(default=2, ge=1)
    generator_divisor: int = Field(default=4, ge=1)

    @property
    def head_activation(self) -> Activation:
        """Always the exact GELU, because transformers' class for the generator's head supports no other."""
        return "gelu"

    @property
    def generator(self) -> "ElectraConfig":
        """The generator, as a model of its own: same depth and embeddings; the other sizes are divided."""
        divisor = self.generator_divisor
        shape = {
            "hidden": self.hidden // divisor,
            "heads": max(1, self.heads // divisor),
            "feed_forward": self.feed_forward // divisor,
            "generator_divisor": 1,
        }
        return ElectraConfig.model_validate(self.model_dump() | shape)

    @property
    def segments(self) -> int:
        return self.token_types

    def paired_with(self, generator: EncoderConfig) -> Self:
        return self.model_copy(update={"generator_divisor": self.hidden // generator.hidden})

    def encoder(
        self,
        *,
        embeddings: "Embeddings | None" = None,
        checkpoint_activations: bool = False,
        attend: "Attend | None" = None,
    ) -> "Encoder":
        from torch import nn

        from encoder_core.layers.encoder import Encoder

        return Encoder(
            embeddings or _embeddings(self),
            encoder_layers(self, self.layers, lambda: attend),
            projection=nn.Linear(self.embedding, self.hidden) if self.embedding != self.hidden else None,
            checkpoint_activations=checkpoint_activations,
        )

    @property
    def width_keys(self) -> tuple[str, ...]:
        """As everywhere; embeddings of a width of their own keep it."""
        return (*super().width_keys, "embedding") if self.embedding == self.hidden else super().width_keys

    @property
    def embedding_width(self) -> int:
        return self.embedding

    def shrink(self, form: SmallForm) -> dict[str, object]:
        narrow = self.embedding < self.hidden
        own = {"embedding": form.embedding if narrow else form.hidden, "generator_divisor": 4}
        return super().shrink(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        match heads:
            case "mlm":
                return HfNetwork("ElectraForMaskedLM", masked_lm(self), to_json(self))
            case "rtd":
                return HfNetwork("ElectraForPreTraining", detection(self), to_json(self))
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("electra", "ElectraModel", from_json),)


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


def _embeddings(config: ElectraConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.embedding,
        positions=config.max_length,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


_ENCODER = (
    *embedding_pairs("encoder.embeddings", "electra.embeddings"),
    Pair("encoder.embeddings.token_type.weight", "electra.embeddings.token_type_embeddings.weight"),
    *layer_pairs("encoder.layers.{layer}", "electra.encoder.layer.{layer}"),
)

_PROJECTION = with_bias("encoder.projection", "electra.embeddings_project")

_GENERATOR = (
    *with_bias("head.dense", "generator_predictions.dense"),
    *with_bias("head.norm", "generator_predictions.LayerNorm"),
    Pair("head.decoder.bias", "generator_lm_head.bias"),
)

_DISCRIMINATOR = (
    *with_bias("head.dense", "discriminator_predictions.dense"),
    *with_bias("head.score", "discriminator_predictions.dense_prediction"),
)

_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
"""What transformers assumes where a config.json is silent, beyond `interchange.DEFAULTS`."""


def masked_lm(config: ElectraConfig) -> KeyTable:
    """Return the generator's parameters; `config` is the generator's own configuration."""
    return KeyTable(
        (*_shared_names(config), *_GENERATOR),
        tied=("generator_lm_head.weight",),
        unused=(*_BUFFERS, *(pair.theirs for pair in _DISCRIMINATOR)),
    )


def detection(config: ElectraConfig) -> KeyTable:
    """Return the discriminator's parameters."""
    unused = (*_BUFFERS, *(pair.theirs for pair in _GENERATOR), "generator_lm_head.weight")
    return KeyTable((*_shared_names(config), *_DISCRIMINATOR), unused=unused)


def with_detection(encoder: KeyTable) -> KeyTable:
    """Return the parameters of another family's encoder with a detection head under ELECTRA's names. The family's
    class of transformers ignores that head.
    """
    return replace(encoder, pairs=(*encoder.pairs, *_DISCRIMINATOR))


def _shared_names(config: ElectraConfig) -> tuple[Pair, ...]:
    return _ENCODER if config.embedding == config.hidden else (*_ENCODER, *_PROJECTION)


def to_json(config: ElectraConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe one network; `generator_divisor` is left out."""
    return {
        "model_type": "electra",
        **shared_to_json(config),
        "embedding_size": config.embedding,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
    }


def from_json(fields: dict[str, Any]) -> ElectraConfig:
    """Return our configuration for the fields of a config.json, with a generator as wide as this network.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DEFAULTS | fields
    return ElectraConfig(
        **shared_from_json(fields),
        embedding=fields["embedding_size"],
        max_length=fields["max_position_embeddings"],
        token_types=fields["type_vocab_size"],
        generator_divisor=1,
    )
