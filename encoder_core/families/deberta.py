"""DeBERTa (He et al., 2020, arXiv 2006.03654): words and distances are kept apart in attention.

A score is the sum of content to content, content to position and position to content (section 3.1, disentangled
attention). Absolute positions enter only before the prediction, in the enhanced mask decoder (section 3.2). Version 2
shares its projections between contents and positions, counts distances in logarithmic buckets, and may convolve
beside its first layer. Version 3 (2111.09543) is version 2's encoder, trained as ELECTRA's discriminator.

transformers has no enhanced mask decoder: there our logits are those of the plain decoder. The decoder's absolute
positions travel under the name that the published weights give them, which transformers skips. It has no class for
version 3's discriminator: a folder of one is loaded as `DebertaV2Model`, without its head.
"""

from collections.abc import Collection
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig, SmallForm, WithGenerator
from encoder_core.families.interchange import (
    Format,
    Heads,
    KeyTable,
    Pair,
    Written,
    shared_from_json,
    shared_to_json,
    with_bias,
)
from encoder_core.layers.attention import Attend
from encoder_core.layers.attention import automatic as plain_attention
from encoder_core.layers.deberta_attention import (
    AttendDisentangled,
    DisentangledAttention,
    FusedProjections,
    RelativePositions,
    SharedProjections,
    automatic,
)
from encoder_core.layers.deberta_encoder import Convolution, DisentangledEncoder, DisentangledLayer
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
    name: ClassVar[str] = "DeBERTa"
    recipe: ClassVar[str] = "deberta-base"
    layer_norm_eps: float = Field(default=1e-7, gt=0)
    mask_decoder: Literal["enhanced", "plain"] = "enhanced"
    position_to_position: bool = False

    def encoder(
        self,
        *,
        embeddings: Embeddings | None = None,
        checkpoint_activations: bool = False,
        attend: Attend = plain_attention,
    ) -> DisentangledEncoder:
        """Disentangled attention has kernels of its own, in place of `attend`."""
        return _built(self, embeddings, checkpoint_activations)

    def written(self, heads: Heads) -> Written | None:
        match heads:
            case "mlm":
                return Written("DebertaForMaskedLM", table(self), to_json(self))
            case "rtd":
                return Written("DebertaModel", detection(self), to_json(self))
            case _:
                return None

    @classmethod
    def formats(cls) -> tuple[Format, ...]:
        return (Format("deberta", "DebertaModel", from_json),)


class DebertaV2Config(EncoderConfig):
    """The second version, and the third, which has the second's encoder.

    Attributes:
        mask_decoder, position_to_position: see `DebertaConfig`.
        buckets: rows of the position table each way.
        convolution: width of the convolution beside the first layer; None for none.
        generator_layers: depth of the generator (version 3), otherwise as this network; None for half the depth.
    """

    family: Literal["deberta_v2"] = "deberta_v2"
    name: ClassVar[str] = "DeBERTa v2"
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
        """The generator, as a model in its own right: as wide, half as deep (DeBERTaV3, section 3.1)."""
        layers = self.generator_layers or max(1, self.layers // 2)
        return self.model_copy(update={"layers": layers, "generator_layers": None})

    def encoder(
        self,
        *,
        embeddings: Embeddings | None = None,
        checkpoint_activations: bool = False,
        attend: Attend = plain_attention,
    ) -> DisentangledEncoder:
        """Disentangled attention has kernels of its own, in place of `attend`."""
        return _built(self, embeddings, checkpoint_activations)

    def title(self, terms: Collection[str]) -> str:
        return "DeBERTa v3" if "rtd" in terms else "DeBERTa v2"

    def with_layers(self, layers: int) -> Self:
        deep = self.generator_layers and min(self.generator_layers, layers)
        return super().with_layers(layers).model_copy(update={"generator_layers": deep})

    def small(self, form: SmallForm) -> dict[str, object]:
        own = {"buckets": form.buckets, "generator_layers": self.generator_layers and 1}
        return super().small(form) | own

    def written(self, heads: Heads) -> Written | None:
        match heads:
            case "mlm":
                return Written("DebertaV2ForMaskedLM", table(self), to_json(self))
            case "rtd":
                return Written("DebertaV2Model", detection(self), to_json(self))
            case _:
                return None

    @classmethod
    def formats(cls) -> tuple[Format, ...]:
        return (Format("deberta-v2", "DebertaV2Model", from_json),)


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


def _built(
    config: DebertaConfig | DebertaV2Config, embeddings: Embeddings | None, checkpoint_activations: bool
) -> DisentangledEncoder:
    return DisentangledEncoder(
        embeddings or _embeddings(config),
        _positions(config),
        [_layer(config, automatic) for _ in range(config.layers)],
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

_OURS = "encoder.layers.{layer}.attention.projections"
_THEIRS = "deberta.encoder.layer.{layer}.attention.self"

_FUSED = (
    Pair(f"{_OURS}.content.weight", f"{_THEIRS}.in_proj.weight"),
    Pair(f"{_OURS}.query.bias", f"{_THEIRS}.q_bias"),
    Pair(f"{_OURS}.value.bias", f"{_THEIRS}.v_bias"),
    Pair(f"{_OURS}.position_key.weight", f"{_THEIRS}.pos_proj.weight"),
    *with_bias(f"{_OURS}.position_query", f"{_THEIRS}.pos_q_proj"),
)

_SHARED = (
    *with_bias(f"{_OURS}.query", f"{_THEIRS}.query_proj"),
    *with_bias(f"{_OURS}.key", f"{_THEIRS}.key_proj"),
    *with_bias(f"{_OURS}.value", f"{_THEIRS}.value_proj"),
    *with_bias("encoder.positions.norm", "deberta.encoder.LayerNorm"),
)

_ENDS = (
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

_BUFFERS = ("deberta.embeddings.position_ids",)


def table(config: DebertaConfig | DebertaV2Config) -> KeyTable:
    """The parameters of this model and its masked-language-model head."""
    pairs = (*_encoder(config), *_HEAD)
    unused = (*_BUFFERS, *(pair.theirs for pair in _DETECTION))
    if config.mask_decoder == "enhanced":
        pairs = (*pairs, _POSITIONS)
    else:
        unused = (*unused, _POSITIONS.theirs)
    return KeyTable(pairs, tied=_LEGACY_TIED, unused=unused, aliases=_LEGACY_HEAD)


def detection(config: DebertaConfig | DebertaV2Config) -> KeyTable:
    """The discriminator's parameters (version 3, and the first trained in its way)."""
    unused = (*_BUFFERS, _POSITIONS.theirs, *(pair.theirs for pair in _HEAD))
    return KeyTable((*_encoder(config), *_DETECTION), tied=_LEGACY_TIED, unused=unused, aliases=_LEGACY_HEAD)


def _encoder(config: DebertaConfig | DebertaV2Config) -> tuple[Pair, ...]:
    if isinstance(config, DebertaConfig):
        return (*_ENDS, *_LAYER, *_FUSED)
    return (*_ENDS, *_LAYER, *_SHARED, *(_CONVOLUTION if config.convolution is not None else ()))


def to_json(config: DebertaConfig | DebertaV2Config) -> dict[str, Any]:
    """The fields of config.json that describe one network; `mask_decoder` is ours alone, and `generator_layers` has no
    place there.

    Raises ModelError for a model with the term between positions, which transformers' classes would leave out.
    """
    if config.position_to_position:
        raise ModelError(
            "model.position_to_position has no counterpart in transformers, whose classes would compute something else",
            remedy="go on from this run with `start:` in another recipe, or train without it to export",
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
    },
}
"""What transformers assumes where a config.json is silent, beyond `parts.DEFAULTS`."""

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


def from_json(fields: dict[str, Any]) -> DebertaConfig | DebertaV2Config:
    """The inverse. Raises ModelError for a variant that was never published."""
    fields = _COMMON_DEFAULTS | DEFAULTS[fields["model_type"]] | fields
    _check(fields)
    values = shared_from_json(fields)
    values |= {"max_length": fields["max_position_embeddings"], "mask_decoder": fields["mask_decoder"]}
    if fields["model_type"] == "deberta":
        return DebertaConfig(**values)
    kernel = fields.get("conv_kernel_size", 0)
    if kernel and fields.get("conv_act", "tanh") != fields["hidden_act"]:
        _refuse("conv_act", fields.get("conv_act", "tanh"), fields["hidden_act"])
    return DebertaV2Config(**values, buckets=fields.get("position_buckets", -1), convolution=kernel or None)


def _check(fields: dict[str, Any]) -> None:
    """Refuse what is not the published architecture, first difference first."""
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
            _refuse(name, fields.get(name), values[0])
    kinds = fields["pos_att_type"] or []
    if set(kinds.split("|") if isinstance(kinds, str) else kinds) != {"p2c", "c2p"}:
        _refuse("pos_att_type", kinds, "p2c|c2p")


def _refuse(name: str, value: object, expected: object) -> NoReturn:
    raise ModelError(
        f"config.json: {name} is {value!r}, which is not supported",
        remedy=f"use weights of the published architecture, whose {name} is {expected!r}",
    )
