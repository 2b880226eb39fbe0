"""DeBERTa (He et al., 2020, arXiv 2006.03654): disentangled attention, with separate terms for contents and distances.

A score is the sum of content-to-content, content-to-position and position-to-content terms (section 3.1). Absolute
positions enter only before the prediction, in the enhanced mask decoder (section 3.2). Version 2 shares its projections
between contents and positions, groups distances in logarithmic buckets, and may have a convolution after its first
layer. Version 3 (2111.09543) is version 2's encoder, trained as the discriminator of replaced-token detection.

transformers has no enhanced mask decoder, so its logits are those of the plain head. It ignores the mask decoder's
absolute positions, which published weights have. It has no class for version 3's discriminator: it loads such a
folder as `DebertaV2Model`, without the head.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator
from encoder_core.families.config_json import (
    ENCODER_FLAGS,
    TIED_DECODER_CONSTANT,
    ConfigJson,
    JsonFields,
    bert_fields,
    published_value,
    unsupported_value_error,
)
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    NamePair,
    layer_pairs,
    weight_and_bias,
)
from encoder_core.layers.sizes import SmallForm, linear_weight_count, norm_weight_count

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from encoder_core.layers.deberta_encoder import DisentangledEncoder, DisentangledLayer
    from encoder_core.layers.encoder import Embeddings


class DisentangledConfig(WithGenerator):
    """The settings that all versions of DeBERTa share.

    Attributes:
        mask_decoder: enhanced: absolute positions are added before the prediction, as in the paper. plain: the last
            layer's output is used, as in transformers' classes.
        position_to_position: whether scores have a position-to-position term, which the paper mentions and omits.
            transformers' classes lack it, so such a model cannot be exported.
    """

    takes_token_types: ClassVar[bool] = True  # transformers' class accepts token types, and ignores them
    context_norm: ClassVar[bool] = True
    transformers_name: ClassVar[str]  # prefix of the names of transformers' classes
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False

    @property
    def position_table_rows(self) -> int:
        return 0

    def encoder(self, *, embeddings: "Embeddings | None" = None) -> "DisentangledEncoder":
        from encoder_core.layers.deberta_attention import RelativePositions
        from encoder_core.layers.deberta_encoder import Convolution, DisentangledEncoder

        config, eps = cast(Deberta, self), self.layer_norm_eps
        buckets, width = (config.buckets, config.convolution) if isinstance(config, DebertaV2Config) else (None, None)
        return DisentangledEncoder(
            embeddings or self.input_embeddings(),
            RelativePositions(self.max_length, self.hidden, buckets=buckets, eps=eps),
            [_build_layer(config) for _ in range(self.layers)],
            convolution=Convolution(self.hidden, width, activation=self.activation, eps=eps, dropout=self.dropout)
            if width
            else None,
        )

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        config, name = cast(Deberta, self), self.transformers_name
        match heads:
            case "mlm":
                return HfNetwork(f"{name}ForMaskedLM", masked_lm_table(config), to_json(config))
            case "rtd":
                return HfNetwork(f"{name}Model", detection_table(config), to_json(config))
            case _:
                return None


class DebertaConfig(DisentangledConfig):
    """The configuration of the first version. See `WithGenerator` and `DisentangledConfig`."""

    family: Literal["deberta"] = "deberta"
    name: ClassVar[str] = "DeBERTa"
    transformers_name: ClassVar[str] = "Deberta"
    recipe: ClassVar[str] = "deberta-base"

    def encoder_weight_count(self) -> int:
        positions = self.hidden * self.hidden + linear_weight_count(self.hidden, self.hidden) - self.hidden
        tables = 2 * self.max_length * self.hidden
        return super().encoder_weight_count() + tables + self.layers * positions  # "- hidden": the key has no bias

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("deberta", "DebertaModel", from_json),)


class DebertaV2Config(DisentangledConfig):
    """The configuration of the second version, and of the third, which has the same encoder.

    Attributes:
        buckets: rows of the position table in each direction.
        convolution: kernel size of the convolution that is added after the first layer; None: no convolution.
        generator_layers: number of layers of version 3's generator, which is otherwise like this network; None: half.
    """

    family: Literal["deberta_v2"] = "deberta_v2"
    name: ClassVar[str] = "DeBERTa v2"
    transformers_name: ClassVar[str] = "DebertaV2"
    recipe: ClassVar[str] = "deberta-v2-xlarge"
    pair_recipe: ClassVar[str] = "deberta-v3-base"
    buckets: int = Field(default=256, ge=2, multiple_of=2)
    convolution: Literal[3] | None = None
    generator_layers: int | None = Field(default=None, gt=0)

    def title(self, terms: Collection[str]) -> str:
        return "DeBERTa v3" if "rtd" in terms else "DeBERTa v2"

    def with_layers(self, layers: int) -> Self:
        deep = self.generator_layers and min(self.generator_layers, layers)
        return super().with_layers(layers).model_copy(update={"generator_layers": deep})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        return super().small_form_fields(form) | {"buckets": form.buckets}

    def encoder_weight_count(self) -> int:
        kernel = (self.convolution or 0) * self.hidden
        convolution = linear_weight_count(kernel, self.hidden) + norm_weight_count(self.hidden) if kernel else 0
        table = 2 * self.buckets * self.hidden + norm_weight_count(self.hidden)
        return super().encoder_weight_count() + convolution + table

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("deberta-v2", "DebertaV2Model", v2_from_json),)


Deberta = DebertaConfig | DebertaV2Config


def _build_layer(config: Deberta) -> "DisentangledLayer":
    from encoder_core.layers import deberta_attention as parts
    from encoder_core.layers.deberta_encoder import DisentangledLayer
    from encoder_core.layers.encoder import FeedForward

    projections = parts.SharedProjections if isinstance(config, DebertaV2Config) else parts.FusedProjections
    attention = parts.DisentangledAttention(
        projections(config.hidden, config.heads),
        config.hidden,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        position_to_position=config.position_to_position,
        attend=parts.attend_with_best_kernel,
    )
    inner, eps = FeedForward(config.hidden, config.feed_forward, config.activation), config.layer_norm_eps
    return DisentangledLayer(attention, inner, config.hidden, eps=eps, dropout=config.dropout)


_LAYER_PAIRS = layer_pairs("deberta.encoder.layer.{layer}")[6:]
"""BERT's pairs of names of a layer, without those of query, key and value."""

_OUR_ATTENTION = "encoder.layers.{layer}.attention.projections"
_THEIR_ATTENTION = "deberta.encoder.layer.{layer}.attention.self"

_FUSED_PROJECTIONS = (
    NamePair(f"{_OUR_ATTENTION}.content.weight", f"{_THEIR_ATTENTION}.in_proj.weight"),
    NamePair(f"{_OUR_ATTENTION}.query.bias", f"{_THEIR_ATTENTION}.q_bias"),
    NamePair(f"{_OUR_ATTENTION}.value.bias", f"{_THEIR_ATTENTION}.v_bias"),
    NamePair(f"{_OUR_ATTENTION}.position_key.weight", f"{_THEIR_ATTENTION}.pos_proj.weight"),
    *weight_and_bias(f"{_OUR_ATTENTION}.position_query", f"{_THEIR_ATTENTION}.pos_q_proj"),
)

_SHARED_PROJECTIONS = (
    *weight_and_bias(f"{_OUR_ATTENTION}.query", f"{_THEIR_ATTENTION}.query_proj"),
    *weight_and_bias(f"{_OUR_ATTENTION}.key", f"{_THEIR_ATTENTION}.key_proj"),
    *weight_and_bias(f"{_OUR_ATTENTION}.value", f"{_THEIR_ATTENTION}.value_proj"),
    *weight_and_bias("encoder.positions.norm", "deberta.encoder.LayerNorm"),
)

_EMBEDDINGS = (
    NamePair("encoder.embeddings.word.weight", "deberta.embeddings.word_embeddings.weight"),
    *weight_and_bias("encoder.embeddings.norm", "deberta.embeddings.LayerNorm"),
    NamePair("encoder.positions.embedding.weight", "deberta.encoder.rel_embeddings.weight"),
)

_HEAD = (
    *weight_and_bias("head.dense", "lm_predictions.lm_head.dense"),
    *weight_and_bias("head.norm", "lm_predictions.lm_head.LayerNorm"),
    NamePair("head.decoder.bias", "lm_predictions.lm_head.bias"),
)

# The head's names in folders whose config.json has `legacy: true`, transformers' default.
_LEGACY_HEAD = (
    ("cls.predictions.transform.", "lm_predictions.lm_head."),
    ("cls.predictions.bias", "lm_predictions.lm_head.bias"),
)
_LEGACY_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

_CONVOLUTION = (
    *weight_and_bias("encoder.convolution.convolution", "deberta.encoder.conv.conv"),
    *weight_and_bias("encoder.convolution.norm", "deberta.encoder.conv.LayerNorm"),
)

_ABSOLUTE_POSITIONS = NamePair("decoder.position.weight", "deberta.embeddings.position_embeddings.weight")

# The discriminator's head; version 3's published weights have it under these names, in addition to `_HEAD`.
_DETECTION = (
    *weight_and_bias("head.norm", "mask_predictions.LayerNorm"),
    *weight_and_bias("head.dense", "mask_predictions.dense"),
    *weight_and_bias("head.score", "mask_predictions.classifier"),
)

# "_weight" are the differences of gradient-disentangled embedding sharing, which published "weight" tables include.
_UNUSED_TABLES = ("position_ids", "word_embeddings._weight", "position_embeddings._weight")
_BUFFERS = tuple(f"deberta.embeddings.{name}" for name in _UNUSED_TABLES)


def masked_lm_table(config: Deberta) -> KeyTable:
    """Return the names of the parameters of the encoder and its masked-language-model head."""
    pairs = (*_encoder_pairs(config), *_HEAD)
    unused = (*_BUFFERS, *(pair.theirs for pair in _DETECTION))
    if config.mask_decoder == "enhanced":
        pairs = (*pairs, _ABSOLUTE_POSITIONS)
    else:
        unused = (*unused, _ABSOLUTE_POSITIONS.theirs)
    return KeyTable(pairs, tied=_LEGACY_TIED, unused=unused, aliases=_LEGACY_HEAD)


def detection_table(config: Deberta) -> KeyTable:
    """Return the names of a discriminator's parameters (version 3, or version 1 trained in the same way)."""
    unused = (*_BUFFERS, _ABSOLUTE_POSITIONS.theirs, *(pair.theirs for pair in _HEAD), *_LEGACY_TIED)
    return KeyTable((*_encoder_pairs(config), *_DETECTION), unused=unused, aliases=_LEGACY_HEAD)


def _encoder_pairs(config: Deberta) -> tuple[NamePair, ...]:
    if isinstance(config, DebertaConfig):
        return (*_EMBEDDINGS, *_LAYER_PAIRS, *_FUSED_PROJECTIONS)
    convolution = () if config.convolution is None else _CONVOLUTION
    return (*_EMBEDDINGS, *_LAYER_PAIRS, *_SHARED_PROJECTIONS, *convolution)


def _fields(**defaults: Any) -> JsonFields:
    """Return the fields of both versions. `defaults`: transformers' default values, by our names."""
    return {
        **bert_fields(layer_norm_eps=1e-7, **defaults),
        "max_length": ("max_position_embeddings", 512),
        "mask_decoder": ("mask_decoder", "enhanced"),
    }


_CONSTANTS = {
    **TIED_DECODER_CONSTANT,
    "relative_attention": published_value("relative_attention", True),
    "position_biased_input": published_value("position_biased_input", False),
    "type_vocab_size": published_value("type_vocab_size", 0),
}
_V2_CONSTANTS = {
    **_CONSTANTS,
    "share_att_key": published_value("share_att_key", True),
    "norm_rel_ebd": published_value("norm_rel_ebd", "layer_norm"),
}
_HF_DEFAULTS = {"relative_attention": False, "position_biased_input": True, "max_relative_positions": -1}
"""Transformers' defaults for fields that a config.json lacks; they are never those of the published architecture."""

CONFIG_JSON_BY_FAMILY = {
    "deberta": ConfigJson(
        "deberta", _fields(vocab=50_265), _CONSTANTS, ENCODER_FLAGS, _HF_DEFAULTS | {"pos_att_type": None}
    ),
    "deberta_v2": ConfigJson(
        "deberta-v2",
        {
            **_fields(vocab=128_100, hidden=1536, layers=24, heads=24, feed_forward=6144),
            "buckets": ("position_buckets", -1),
        },
        _V2_CONSTANTS,
        ENCODER_FLAGS,
        _HF_DEFAULTS
        | {"pos_att_type": None, "share_att_key": False, "norm_rel_ebd": "none"}
        | {"conv_act": "tanh", "conv_kernel_size": 0},
    ),
}


def to_json(config: Deberta) -> dict[str, Any]:
    """Return the fields of config.json of one network, including our own field `mask_decoder`.

    Raises:
        ModelError: the model has the position-to-position term, which transformers' classes lack.
    """
    if config.position_to_position:
        raise ModelError(
            "model.position_to_position is true, but transformers' classes lack this term and compute other scores",
            remedy="continue this run in another one, by `start:` in its recipe; or train without position_to_position",
        )
    fields = CONFIG_JSON_BY_FAMILY[config.family].to_fields(
        config, legacy=False, max_relative_positions=-1, pos_att_type=["p2c", "c2p"]
    )
    if isinstance(config, DebertaV2Config) and config.convolution is not None:
        fields |= {"conv_kernel_size": config.convolution, "conv_act": fields["hidden_act"]}
    return fields


def _published_fields(form: ConfigJson, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's fields with transformers' defaults. Raises ModelError: no such model was published."""
    fields = form.fill_defaults(fields)
    kinds = fields["pos_att_type"] or []
    kinds = set(kinds.split("|") if isinstance(kinds, str) else kinds)
    expected: dict[str, tuple[bool, object]] = {
        "max_relative_positions": (fields["max_relative_positions"] in (-1, fields["max_position_embeddings"]), -1),
        "pos_att_type": (kinds == {"p2c", "c2p"}, "p2c|c2p"),
    }
    if "buckets" in form.fields:
        expected["position_buckets"] = fields["position_buckets"] > 0, 256
        expected["conv_kernel_size"] = fields["conv_kernel_size"] in (None, 0, 3), 3
    if fields.get("conv_kernel_size"):
        expected["conv_act"] = fields["conv_act"] == fields["hidden_act"], fields["hidden_act"]
    for name, (is_published, value) in expected.items():
        if not is_published:
            raise unsupported_value_error(name, fields, published_value(name, value)[1])
    return fields


def from_json(fields: dict[str, Any]) -> DebertaConfig:
    """Return our configuration for a config.json of version 1. Raises ModelError: see `_published_fields`."""
    form = CONFIG_JSON_BY_FAMILY["deberta"]
    return DebertaConfig(**form.to_settings(_published_fields(form, fields)))


def v2_from_json(fields: dict[str, Any]) -> DebertaV2Config:
    """Return our configuration for a config.json of version 2 or 3. Raises ModelError: see `_published_fields`."""
    form = CONFIG_JSON_BY_FAMILY["deberta_v2"]
    fields = _published_fields(form, fields)
    return DebertaV2Config(**form.to_settings(fields), convolution=fields["conv_kernel_size"] or None)
