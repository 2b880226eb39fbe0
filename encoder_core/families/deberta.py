"""DeBERTa (He et al., 2020, arXiv 2006.03654): attention treats words and distances separately.

A score is the sum of content-to-content, content-to-position and position-to-content terms (section 3.1, disentangled
attention). Absolute positions enter only before the prediction, in the enhanced mask decoder (section 3.2). Version 2
shares its projections between contents and positions, counts distances in logarithmic buckets, and may have a
convolution beside its first layer. Version 3 (2111.09543) is version 2's encoder, trained as ELECTRA's discriminator.

transformers has no enhanced mask decoder: its logits are the plain decoder's. It skips the decoder's absolute
positions, which are stored under their name in the published weights. It has no class for version 3's discriminator:
it loads such a folder as `DebertaV2Model`, without the head.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig, SmallForm, WithGenerator
from encoder_core.families.interchange import DEFAULTS as SHARED_DEFAULTS
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    shared_from_json,
    shared_to_json,
    unpublished,
    with_bias,
)
from encoder_core.layers.sizes import linear_weights, norm_weights

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.deberta_attention import RelativePositions
    from encoder_core.layers.deberta_encoder import Convolution, DisentangledEncoder, DisentangledLayer
    from encoder_core.layers.encoder import Embeddings


class Disentangled(EncoderConfig):
    """What both versions share; positions are counted by the encoder."""

    takes_token_types: ClassVar[bool] = True  # transformers' class does, and ignores them
    context_norm: ClassVar[bool] = True
    transformers_name: ClassVar[str]  # begins the names of transformers' classes

    @property
    def position_rows(self) -> int:
        return 0

    def encoder(
        self,
        *,
        embeddings: "Embeddings | None" = None,
        checkpoint_activations: bool = False,
        attend: "Attend | None" = None,
    ) -> "DisentangledEncoder":
        """Build the encoder. `attend` is not used: disentangled attention has its own kernels."""
        from encoder_core.layers.deberta_encoder import DisentangledEncoder
        from encoder_core.layers.encoder import Embeddings

        config, eps, dropout = cast(Deberta, self), self.layer_norm_eps, self.dropout
        return DisentangledEncoder(
            embeddings or Embeddings(self.vocabulary, self.hidden, positions=0, eps=eps, dropout=dropout),
            _relative_positions(config),
            [_layer(config) for _ in range(self.layers)],
            convolution=_convolution(config),
            checkpoint_activations=checkpoint_activations,
        )

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        config, name = cast(Deberta, self), self.transformers_name
        match heads:
            case "mlm":
                return HfNetwork(f"{name}ForMaskedLM", table(config), to_json(config))
            case "rtd":
                return HfNetwork(f"{name}Model", detection(config), to_json(config))
            case _:
                return None


class DebertaConfig(Disentangled, WithGenerator):
    """The configuration of the first version. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        mask_decoder: enhanced adds absolute positions before the prediction, as the paper does; plain predicts from
            the last layer, as transformers' classes do.
        position_to_position: whether scores have a term between relative positions, which the paper mentions and
            leaves out. transformers' classes lack it, so such a model cannot be exported.
    """

    family: Literal["deberta"] = "deberta"
    name: ClassVar[str] = "DeBERTa"
    transformers_name: ClassVar[str] = "Deberta"
    recipe: ClassVar[str] = "deberta-base"
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False

    def encoder_weights(self) -> int:
        positions = self.hidden * self.hidden + linear_weights(self.hidden, self.hidden) - self.hidden
        tables = 2 * self.max_length * self.hidden
        return super().encoder_weights() + tables + self.layers * positions  # keys have no bias

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("deberta", "DebertaModel", from_json),)


class DebertaV2Config(Disentangled):
    """The configuration of the second version, and of the third, which has the same encoder.

    Attributes:
        mask_decoder, position_to_position: as in `DebertaConfig`.
        buckets: rows of the position table in each direction.
        convolution: width of the convolution beside the first layer; None for none.
        generator_layers: depth of the generator (version 3), which otherwise equals this network; None: half the depth.
    """

    family: Literal["deberta_v2"] = "deberta_v2"
    name: ClassVar[str] = "DeBERTa v2"
    transformers_name: ClassVar[str] = "DebertaV2"
    recipe: ClassVar[str] = "deberta-v2-xlarge"
    pair_recipe: ClassVar[str] = "deberta-v3-base"
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False
    buckets: int = Field(default=256, ge=2, multiple_of=2)
    convolution: Literal[3] | None = None
    generator_layers: int | None = Field(default=None, gt=0)

    @property
    def generator(self) -> "DebertaV2Config":
        """The generator, as a model of its own: equally wide, half as deep (DeBERTaV3, section 3.1)."""
        layers = self.generator_layers or max(1, self.layers // 2)
        return self.model_copy(update={"layers": layers, "generator_layers": None})

    def title(self, terms: Collection[str]) -> str:
        return "DeBERTa v3" if "rtd" in terms else "DeBERTa v2"

    def with_layers(self, layers: int) -> Self:
        deep = self.generator_layers and min(self.generator_layers, layers)
        return super().with_layers(layers).model_copy(update={"generator_layers": deep})

    def shrink(self, form: SmallForm) -> dict[str, object]:
        own = {"buckets": form.buckets, "generator_layers": self.generator_layers and 1}
        return super().shrink(form) | own

    def encoder_weights(self) -> int:
        kernel = (self.convolution or 0) * self.hidden
        convolution = linear_weights(kernel, self.hidden) + norm_weights(self.hidden) if kernel else 0
        table = 2 * self.buckets * self.hidden + norm_weights(self.hidden)
        return super().encoder_weights() + convolution + table

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("deberta-v2", "DebertaV2Model", from_json),)


BASE = DebertaConfig(layers=12, hidden=768, heads=12, feed_forward=3072, vocab=50_265, initializer="normal")
LARGE = DebertaConfig(layers=24, hidden=1024, heads=16, feed_forward=4096, vocab=50_265, initializer="normal")
XLARGE = LARGE.model_copy(update={"layers": 48})

V2_XLARGE = DebertaV2Config(
    layers=24, hidden=1536, heads=24, feed_forward=6144, vocab=128_100, convolution=3, initializer="normal"
)
V2_XXLARGE = V2_XLARGE.model_copy(update={"layers": 48})


def _v3(layers: int, hidden: int) -> DebertaV2Config:
    shape = V2_XLARGE.model_copy(update={"layers": layers, "hidden": hidden, "convolution": None})
    return shape.model_copy(update={"heads": hidden // 64, "feed_forward": 4 * hidden})


V3_XSMALL, V3_SMALL, V3_BASE, V3_LARGE = _v3(12, 384), _v3(6, 768), _v3(12, 768), _v3(24, 1024)

Deberta = DebertaConfig | DebertaV2Config


def _relative_positions(config: Deberta) -> "RelativePositions":
    from encoder_core.layers.deberta_attention import RelativePositions

    buckets = config.buckets if isinstance(config, DebertaV2Config) else None
    return RelativePositions(
        config.max_length, config.hidden, buckets=buckets, norm=buckets is not None, eps=config.layer_norm_eps
    )


def _layer(config: Deberta) -> "DisentangledLayer":
    from encoder_core.layers import deberta_attention as parts
    from encoder_core.layers.deberta_encoder import DisentangledLayer
    from encoder_core.layers.encoder import FeedForward

    second = isinstance(config, DebertaV2Config)
    projections = parts.SharedProjections if second else parts.FusedProjections
    attention = parts.DisentangledAttention(
        projections(config.hidden, config.heads),
        config.hidden,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        position_to_position=config.position_to_position,
        attend=parts.automatic,
    )
    inner, eps = FeedForward(config.hidden, config.feed_forward, config.activation), config.layer_norm_eps
    return DisentangledLayer(attention, inner, config.hidden, eps=eps, dropout=config.dropout)


def _convolution(config: Deberta) -> "Convolution | None":
    from encoder_core.layers.deberta_encoder import Convolution

    if not isinstance(config, DebertaV2Config) or config.convolution is None:
        return None
    width, eps = config.convolution, config.layer_norm_eps
    return Convolution(config.hidden, width, activation=config.activation, eps=eps, dropout=config.dropout)


_LAYER = (
    *with_bias(
        "encoder.layers.{layer}.attention.output", "deberta.encoder.layer.{layer}.attention.output.dense"
    ),
    *with_bias(
        "encoder.layers.{layer}.attention_norm", "deberta.encoder.layer.{layer}.attention.output.LayerNorm"
    ),
    *with_bias("encoder.layers.{layer}.feed_forward.up", "deberta.encoder.layer.{layer}.intermediate.dense"),
    *with_bias("encoder.layers.{layer}.feed_forward.down", "deberta.encoder.layer.{layer}.output.dense"),
    *with_bias("encoder.layers.{layer}.feed_forward_norm", "deberta.encoder.layer.{layer}.output.LayerNorm"),
)

_OUR_ATTENTION = "encoder.layers.{layer}.attention.projections"
_THEIR_ATTENTION = "deberta.encoder.layer.{layer}.attention.self"

_FUSED = (
    Pair(f"{_OUR_ATTENTION}.content.weight", f"{_THEIR_ATTENTION}.in_proj.weight"),
    Pair(f"{_OUR_ATTENTION}.query.bias", f"{_THEIR_ATTENTION}.q_bias"),
    Pair(f"{_OUR_ATTENTION}.value.bias", f"{_THEIR_ATTENTION}.v_bias"),
    Pair(f"{_OUR_ATTENTION}.position_key.weight", f"{_THEIR_ATTENTION}.pos_proj.weight"),
    *with_bias(f"{_OUR_ATTENTION}.position_query", f"{_THEIR_ATTENTION}.pos_q_proj"),
)

_SHARED = (
    *with_bias(f"{_OUR_ATTENTION}.query", f"{_THEIR_ATTENTION}.query_proj"),
    *with_bias(f"{_OUR_ATTENTION}.key", f"{_THEIR_ATTENTION}.key_proj"),
    *with_bias(f"{_OUR_ATTENTION}.value", f"{_THEIR_ATTENTION}.value_proj"),
    *with_bias("encoder.positions.norm", "deberta.encoder.LayerNorm"),
)

_EMBEDDINGS = (
    Pair("encoder.embeddings.word.weight", "deberta.embeddings.word_embeddings.weight"),
    *with_bias("encoder.embeddings.norm", "deberta.embeddings.LayerNorm"),
    Pair("encoder.positions.embedding.weight", "deberta.encoder.rel_embeddings.weight"),
)

_HEAD = (
    *with_bias("head.dense", "lm_predictions.lm_head.dense"),
    *with_bias("head.norm", "lm_predictions.lm_head.LayerNorm"),
    Pair("head.decoder.bias", "lm_predictions.lm_head.bias"),
)

# The same head in a folder whose config.json says `legacy: true`, as transformers writes by default.
_LEGACY_HEAD = (
    ("cls.predictions.transform.", "lm_predictions.lm_head."),
    ("cls.predictions.bias", "lm_predictions.lm_head.bias"),
)
_LEGACY_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

_CONVOLUTION = (
    *with_bias("encoder.convolution.convolution", "deberta.encoder.conv.conv"),
    *with_bias("encoder.convolution.norm", "deberta.encoder.conv.LayerNorm"),
)

_POSITIONS = Pair("decoder.position.weight", "deberta.embeddings.position_embeddings.weight")

# The discriminator's head, under the names of version 3's published weights, which carry it beside the other.
_DETECTION = (
    *with_bias("head.norm", "mask_predictions.LayerNorm"),
    *with_bias("head.dense", "mask_predictions.dense"),
    *with_bias("head.score", "mask_predictions.classifier"),
)

# "_weight": published tables of differences (GDES), which "weight" contains already.
_TABLES = ("position_ids", "word_embeddings._weight", "position_embeddings._weight")
_BUFFERS = tuple(f"deberta.embeddings.{name}" for name in _TABLES)


def table(config: Deberta) -> KeyTable:
    """Return the parameters of this model and its masked-language-model head."""
    pairs = (*_encoder(config), *_HEAD)
    unused = (*_BUFFERS, *(pair.theirs for pair in _DETECTION))
    if config.mask_decoder == "enhanced":
        pairs = (*pairs, _POSITIONS)
    else:
        unused = (*unused, _POSITIONS.theirs)
    return KeyTable(pairs, tied=_LEGACY_TIED, unused=unused, aliases=_LEGACY_HEAD)


def detection(config: Deberta) -> KeyTable:
    """Return the discriminator's parameters (version 3, and version 1 trained in the same way)."""
    unused = (*_BUFFERS, _POSITIONS.theirs, *(pair.theirs for pair in _HEAD), *_LEGACY_TIED)
    return KeyTable((*_encoder(config), *_DETECTION), unused=unused, aliases=_LEGACY_HEAD)


def _encoder(config: Deberta) -> tuple[Pair, ...]:
    if isinstance(config, DebertaConfig):
        return (*_EMBEDDINGS, *_LAYER, *_FUSED)
    return (*_EMBEDDINGS, *_LAYER, *_SHARED, *(_CONVOLUTION if config.convolution is not None else ()))


def to_json(config: Deberta) -> dict[str, Any]:
    """Return the fields of config.json that describe one network: with our own `mask_decoder`, without
    `generator_layers`.

    Raises:
        ModelError: the model has the term between positions, which transformers' classes lack.
    """
    if config.position_to_position:
        raise ModelError(
            "model.position_to_position is true, but transformers' classes lack this term and compute other scores",
            remedy="set `start:` of another recipe to this run, or train without position_to_position to export",
        )
    fields = {
        "model_type": config.family.replace("_", "-"),
        **shared_to_json(config),
        "max_position_embeddings": config.max_length,
        "legacy": False,
        "type_vocab_size": 0,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "mask_decoder": config.mask_decoder,
    }
    if isinstance(config, DebertaConfig):
        return fields
    fields |= {"position_buckets": config.buckets, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    if config.convolution is not None:
        hidden_act = fields["hidden_act"]
        fields |= {"conv_kernel_size": config.convolution, "conv_act": hidden_act}
    return fields


DEFAULTS: dict[str, dict[str, Any]] = {
    "deberta": {"vocab_size": 50_265},
    "deberta-v2": {
        "vocab_size": 128_100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "conv_act": "tanh",
    },
}
"""What transformers assumes where a config.json is silent, beyond `interchange.DEFAULTS`."""

_COMMON_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
    "type_vocab_size": 0,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_biased_input": True,
    "pos_att_type": None,
    "mask_decoder": "enhanced",
}


def from_json(fields: dict[str, Any]) -> Deberta:
    """Return our configuration for a config.json. Raises ModelError: the model is a variant that was never
    published."""
    fields = SHARED_DEFAULTS | _COMMON_DEFAULTS | DEFAULTS[fields["model_type"]] | fields
    _check_published(fields)
    values = shared_from_json(fields)
    values |= {"max_length": fields["max_position_embeddings"], "mask_decoder": fields["mask_decoder"]}
    if fields["model_type"] == "deberta":
        return DebertaConfig(**values)
    kernel = fields.get("conv_kernel_size", 0)
    if kernel and fields["conv_act"] != fields["hidden_act"]:
        raise unpublished("conv_act", fields, fields["hidden_act"])
    return DebertaV2Config(**values, buckets=fields.get("position_buckets", -1), convolution=kernel or None)


def _check_published(fields: dict[str, Any]) -> None:
    """Raise ModelError at the first difference from the published architecture."""
    expected: dict[str, tuple[object, ...]] = {
        "relative_attention": (True,),
        "position_biased_input": (False,),
        "type_vocab_size": (0,),
        "max_relative_positions": (-1, fields["max_position_embeddings"]),
    }
    if fields["model_type"] == "deberta-v2":
        expected |= {"share_att_key": (True,), "norm_rel_ebd": ("layer_norm",)}
    for name, values in expected.items():
        if fields.get(name) not in values:
            raise unpublished(name, fields, values[0])
    kinds = fields["pos_att_type"] or []
    if set(kinds.split("|") if isinstance(kinds, str) else kinds) != {"p2c", "c2p"}:
        raise unpublished("pos_att_type", fields, "p2c|c2p")
