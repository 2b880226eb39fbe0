"""ELECTRA (Clark et al., 2020, arXiv 2003.10555): a discriminator that detects replaced tokens.

A small generator fills masks, and the discriminator predicts for every token whether it was replaced. So it learns
from all tokens, not only from the 15 % that are masked (section 2). Both networks are BERT encoders with shared
embeddings; the generator is narrower (section 3.2).
"""

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field

from encoder_core.families.config import EncoderConfig
from encoder_core.families.config_json import (
    BERT_UNWRITTEN,
    TABLE_SIZE_FIELDS,
    TIED_DECODER_CONSTANT,
    ConfigJson,
    bert_fields,
)
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    NamePair,
    embedding_pairs,
    layer_pairs,
    weight_and_bias,
)
from encoder_core.layers.sizes import Activation, SmallForm


class ElectraConfig(EncoderConfig):
    """The configuration of the discriminator. See `EncoderConfig`.

    Attributes:
        embedding: width of the embeddings, which a Linear projects to `hidden` if that differs.
        token_types: number of segments that have embeddings.
        generator_divisor: factor by which the generator's width, heads and inner width are smaller than the
            discriminator's.
    """

    family: Literal["electra"] = "electra"
    name: ClassVar[str] = "ELECTRA"
    recipe: ClassVar[str] = "electra-base"
    main_heads: ClassVar[Heads] = "rtd"
    has_generator: ClassVar[bool] = True
    embedding: int = Field(default=128, gt=0)
    token_types: int = Field(default=2, ge=1)
    generator_divisor: int = Field(default=4, ge=1)

    @property
    def head_activation(self) -> Activation:
        """Always the exact GELU, the only one that transformers' class for the generator's head supports."""
        return "gelu"

    @property
    def generator(self) -> Self:
        """The configuration of the generator: the same depth and embeddings, other sizes divided by the divisor."""
        divisor = self.generator_divisor
        shape = {
            "hidden": self.hidden // divisor,
            "heads": max(1, self.heads // divisor),
            "feed_forward": self.feed_forward // divisor,
            "generator_divisor": 1,
        }
        return self.model_validate(self.model_dump() | shape)

    def paired_with(self, generator: EncoderConfig) -> Self:
        return self.model_copy(update={"generator_divisor": self.hidden // generator.hidden})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        narrow = self.embedding < self.hidden
        own = {"embedding": form.embedding if narrow else form.hidden, "generator_divisor": 4}
        return super().small_form_fields(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        match heads:
            case "mlm":
                return HfNetwork("ElectraForMaskedLM", masked_lm_table(self), CONFIG_JSON.to_fields(self))
            case "rtd":
                return HfNetwork("ElectraForPreTraining", detection_table(self), CONFIG_JSON.to_fields(self))
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        """Return ELECTRA's model type. A config.json does not give the generator's size, so the divisor is 1."""
        return (
            ModelType(
                "electra",
                "ElectraModel",
                lambda fields: cls(**CONFIG_JSON.read_settings(fields), generator_divisor=1),
            ),
        )


_ENCODER = (
    *embedding_pairs("electra.embeddings", token_types=True),
    *layer_pairs("electra.encoder.layer.{layer}"),
)

_PROJECTION = weight_and_bias("encoder.projection", "electra.embeddings_project")

_GENERATOR_HEAD = (
    *weight_and_bias("head.dense", "generator_predictions.dense"),
    *weight_and_bias("head.norm", "generator_predictions.LayerNorm"),
    NamePair("head.decoder.bias", "generator_lm_head.bias"),
)

_DISCRIMINATOR_HEAD = (
    *weight_and_bias("head.dense", "discriminator_predictions.dense"),
    *weight_and_bias("head.score", "discriminator_predictions.dense_prediction"),
)

_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")  # constants in files

CONFIG_JSON = ConfigJson(
    "electra",
    {
        **bert_fields(hidden=256, heads=4, feed_forward=1024),
        **TABLE_SIZE_FIELDS,
        "embedding": ("embedding_size", 128),
    },
    constants=TIED_DECODER_CONSTANT,
    unwritten=BERT_UNWRITTEN,
)


def masked_lm_table(config: ElectraConfig) -> KeyTable:
    """Return the names of the generator's parameters. `config`: the generator's own configuration."""
    return KeyTable(
        (*_encoder_pairs(config), *_GENERATOR_HEAD),
        tied=("generator_lm_head.weight",),
        unused=(*_BUFFERS, *(pair.theirs for pair in _DISCRIMINATOR_HEAD)),
    )


def detection_table(config: ElectraConfig) -> KeyTable:
    """Return the names of the discriminator's parameters."""
    unused = (*_BUFFERS, *(pair.theirs for pair in _GENERATOR_HEAD), "generator_lm_head.weight")
    return KeyTable((*_encoder_pairs(config), *_DISCRIMINATOR_HEAD), unused=unused)


def add_detection_head(encoder: KeyTable) -> KeyTable:
    """Add ELECTRA's detection head to the table of another family's encoder, whose transformers class ignores it."""
    return replace(encoder, pairs=(*encoder.pairs, *_DISCRIMINATOR_HEAD))


def _encoder_pairs(config: ElectraConfig) -> tuple[NamePair, ...]:
    return _ENCODER if config.embedding == config.hidden else (*_ENCODER, *_PROJECTION)
