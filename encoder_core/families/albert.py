"""ALBERT (Lan et al., 2019, arXiv 1909.11942): BERT with a tenth of the parameters.

The word embeddings are narrow, and a Linear widens them (section 3.1, factorised embeddings). All layers share the
parameters of one (cross-layer sharing). Sentence order prediction replaces next sentence prediction.
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from encoder_core.families.config import WithGenerator
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
from encoder_core.layers.sizes import SmallForm


class AlbertConfig(WithGenerator):
    """The configuration of an ALBERT. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        embedding: width of the embeddings, which are projected to `hidden`, and of the head.
        groups: number of distinct layers; depth i runs layer i / (layers / groups), rounded down (in floating point, as
            in transformers). 1: all depths share one layer.
        token_types: number of segments that have embeddings.
    """

    family: Literal["albert"] = "albert"
    name: ClassVar[str] = "ALBERT"
    recipe: ClassVar[str] = "albert-base"
    embedding: int = Field(default=128, gt=0)
    groups: int = Field(default=1, gt=0)
    token_types: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.groups > self.layers:
            raise ValueError(f"groups ({self.groups}) must not be more than layers ({self.layers})")
        return self

    @property
    def distinct_layer_count(self) -> int:
        return self.groups

    @property
    def generator(self) -> Self:
        """The configuration of the generator, in which `groups` is at most the number of layers."""
        shallow = super().generator
        return shallow.model_copy(update={"groups": min(self.groups, shallow.layers)})

    @property
    def has_pair_class(self) -> bool:
        return True

    @property
    def projects_embeddings(self) -> bool:
        return True

    def with_layers(self, layers: int) -> Self:
        return super().with_layers(layers).model_copy(update={"groups": min(self.groups, layers)})

    def small_form_fields(self, form: SmallForm) -> dict[str, object]:
        own = {"embedding": form.embedding, "groups": min(self.groups, form.layers)}
        return super().small_form_fields(form) | own

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        fields = CONFIG_JSON.to_fields(self, classifier_dropout_prob=self.dropout)
        match heads:
            case "mlm":
                return HfNetwork("AlbertForMaskedLM", MASKED_LM, fields)
            case "mlm_pair":
                return HfNetwork("AlbertForPreTraining", PRETRAINING, fields)
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("albert", "AlbertModel", lambda fields: cls(**CONFIG_JSON.read_settings(fields))),)


_LAYER = (  # transformers' names of a layer's modules, in the order that `layer_pairs` expects
    *("attention.query", "attention.key", "attention.value", "attention.dense", "attention.LayerNorm"),
    *("ffn", "ffn_output", "full_layer_layer_norm"),
)

_PAIRS = (  # names of the parameters of the encoder and of its masked-language-model head
    *embedding_pairs("albert.embeddings", token_types=True),
    *weight_and_bias("encoder.projection", "albert.encoder.embedding_hidden_mapping_in"),
    *layer_pairs("albert.encoder.albert_layer_groups.{layer}.albert_layers.0", _LAYER),
    *weight_and_bias("head.dense", "predictions.dense"),
    *weight_and_bias("head.norm", "predictions.LayerNorm"),
    NamePair("head.decoder.bias", "predictions.bias"),
)

_PAIR_HEAD = (
    *weight_and_bias("pair_head.pooler", "albert.pooler"),
    *weight_and_bias("pair_head.classifier", "sop_classifier.classifier"),
)

_TIED = ("predictions.decoder.weight", "predictions.decoder.bias")
_BUFFERS = ("albert.embeddings.position_ids", "albert.embeddings.token_type_ids")  # constants in files

# The parameters of AlbertForMaskedLM, and of AlbertForPreTraining, which also has a pair head.
MASKED_LM = KeyTable(_PAIRS, tied=_TIED, unused=(*_BUFFERS, *(pair.theirs for pair in _PAIR_HEAD)))
PRETRAINING = KeyTable((*_PAIRS, *_PAIR_HEAD), tied=_TIED, unused=_BUFFERS)

CONFIG_JSON = ConfigJson(
    "albert",
    {
        **bert_fields(
            vocab=30_000,
            hidden=4096,
            heads=64,
            feed_forward=16_384,
            dropout=0.0,
            attention_dropout=0.0,
            activation="gelu_new",
        ),
        **TABLE_SIZE_FIELDS,
        "embedding": ("embedding_size", 128),
        "groups": ("num_hidden_groups", 1),
    },
    constants={
        **TIED_DECODER_CONSTANT,
        "inner_group_num": (1, "use an ALBERT with one layer per group"),
    },
    unwritten=BERT_UNWRITTEN,
)
