"""ALBERT (Lan et al., 2019, arXiv 1909.11942): BERT with a tenth of the parameters.

The word embeddings are narrow, and a Linear widens them (section 3.1, factorised embeddings). All layers share the
parameters of one (cross-layer sharing). The order of two segments is predicted, not whether they belong together.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import SmallForm, WithGenerator, encoder_layers
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    embedding_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder


class AlbertConfig(WithGenerator):
    """The configuration of an ALBERT. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        embedding: width of the embeddings, which are projected to `hidden`; the head works in this width too.
        groups: number of distinct layers; depth i runs layer i * groups // layers. 1: all depths share one layer.
        token_types: number of segments with an embedding of their own.
    """

    family: Literal["albert"] = "albert"
    name: ClassVar[str] = "ALBERT"
    recipe: ClassVar[str] = "albert-base"
    embedding: int = Field(default=128, gt=0)
    groups: int = Field(default=1, gt=0)
    token_types: int = Field(default=2, ge=1)

    @property
    def distinct_layers(self) -> int:
        return self.groups

    @property
    def generator(self) -> Self:
        """The generator; it has at most as many distinct layers as its depth."""
        shallow = super().generator
        return shallow.model_copy(update={"groups": min(self.groups, shallow.layers)})

    @property
    def segments(self) -> int:
        return self.token_types

    @property
    def has_pair_class(self) -> bool:
        return True

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
            encoder_layers(self, self.groups, lambda: attend),
            schedule=[depth * self.groups // self.layers for depth in range(self.layers)],
            projection=nn.Linear(self.embedding, self.hidden),
            checkpoint_activations=checkpoint_activations,
        )

    @property
    def width_keys(self) -> tuple[str, ...]:
        """As everywhere; embeddings of a width of their own keep it."""
        return (*super().width_keys, "embedding") if self.embedding == self.hidden else super().width_keys

    @property
    def embedding_width(self) -> int:
        return self.embedding

    @property
    def projects_embeddings(self) -> bool:
        return True

    def with_layers(self, layers: int) -> Self:
        return super().with_layers(layers).model_copy(update={"groups": min(self.groups, layers)})

    def shrink(self, form: SmallForm) -> dict[str, object]:
        own = {"embedding": form.embedding, "groups": min(self.groups, form.layers)}
        return super().shrink(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        match heads:
            case "mlm":
                return HfNetwork("AlbertForMaskedLM", MASKED_LM, to_json(self))
            case "mlm_pair":
                return HfNetwork("AlbertForPreTraining", PRETRAINING, to_json(self))
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("albert", "AlbertModel", from_json),)


def _size(layers: int, hidden: int, heads: int) -> AlbertConfig:
    return AlbertConfig(layers=layers, hidden=hidden, heads=heads, feed_forward=4 * hidden, vocab=30_000)


BASE = _size(12, 768, 12)
LARGE = _size(24, 1024, 16)
XLARGE = _size(24, 2048, 16)
XXLARGE = _size(12, 4096, 64)


def _embeddings(config: AlbertConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.embedding,
        positions=config.max_length,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


_OUR_LAYER = "encoder.layers.{layer}"
_THEIR_LAYER = "albert.encoder.albert_layer_groups.{layer}.albert_layers.0"

_PAIRS = (
    *embedding_pairs("encoder.embeddings", "albert.embeddings"),
    Pair("encoder.embeddings.token_type.weight", "albert.embeddings.token_type_embeddings.weight"),
    *with_bias("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
    *with_bias(f"{_OUR_LAYER}.attention.query", f"{_THEIR_LAYER}.attention.query"),
    *with_bias(f"{_OUR_LAYER}.attention.key", f"{_THEIR_LAYER}.attention.key"),
    *with_bias(f"{_OUR_LAYER}.attention.value", f"{_THEIR_LAYER}.attention.value"),
    *with_bias(f"{_OUR_LAYER}.attention.output", f"{_THEIR_LAYER}.attention.dense"),
    *with_bias(f"{_OUR_LAYER}.attention_norm", f"{_THEIR_LAYER}.attention.LayerNorm"),
    *with_bias(f"{_OUR_LAYER}.feed_forward.up", f"{_THEIR_LAYER}.ffn"),
    *with_bias(f"{_OUR_LAYER}.feed_forward.down", f"{_THEIR_LAYER}.ffn_output"),
    *with_bias(f"{_OUR_LAYER}.feed_forward_norm", f"{_THEIR_LAYER}.full_layer_layer_norm"),
    *with_bias("head.dense", "predictions.dense"),
    *with_bias("head.norm", "predictions.LayerNorm"),
    Pair("head.decoder.bias", "predictions.bias"),
)

_PAIR_HEAD = (
    *with_bias("pair_head.pooler", "albert.pooler"),
    *with_bias("pair_head.classifier", "sop_classifier.classifier"),
)

_TIED = ("predictions.decoder.weight", "predictions.decoder.bias")
_BUFFERS = ("albert.embeddings.position_ids", "albert.embeddings.token_type_ids")

MASKED_LM = KeyTable(_PAIRS, tied=_TIED, unused=(*_BUFFERS, *(pair.theirs for pair in _PAIR_HEAD)))
PRETRAINING = KeyTable((*_PAIRS, *_PAIR_HEAD), tied=_TIED, unused=_BUFFERS)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16_384,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
"""What transformers assumes where a config.json is silent, beyond `interchange.DEFAULTS`."""


def to_json(config: AlbertConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model."""
    return {
        "model_type": "albert",
        **shared_to_json(config),
        "embedding_size": config.embedding,
        "num_hidden_groups": config.groups,
        "inner_group_num": 1,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
        "classifier_dropout_prob": config.dropout,
    }


def from_json(fields: dict[str, Any]) -> AlbertConfig:
    """Return our configuration for the fields of a config.json.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DEFAULTS | fields
    if fields["inner_group_num"] != 1:
        raise ModelError(
            f"config.json: inner_group_num is {fields['inner_group_num']}",
            remedy="only ALBERT models with one layer a group can be loaded",
        )
    return AlbertConfig(
        **shared_from_json(fields),
        embedding=fields["embedding_size"],
        groups=fields["num_hidden_groups"],
        max_length=fields["max_position_embeddings"],
        token_types=fields["type_vocab_size"],
    )
