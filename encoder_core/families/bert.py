"""BERT (Devlin et al., 2018, arXiv 1810.04805): the encoder of the Transformer, trained to predict masked words.

BERT masks 15 % of the tokens and predicts them from the text on both sides (section 3.1). Its layers are those of
Vaswani et al. (2017): attention, then a feed-forward block, each followed by a residual sum and a LayerNorm
(post-norm). The embeddings of word, position and segment are summed.

SpanBERT (Joshi et al., 2020) has the same encoder and another objective. DistilBERT (Sanh et al., 2019, section 3) has
half the layers and no token types; transformers has a separate class for it, whose names are at the end of this file.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator, encoder_layers
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

if TYPE_CHECKING:  # torch is imported only where encoders are built, not to read a configuration
    from encoder_core.layers.encoder import EncoderLayer


class BertConfig(WithGenerator):
    """The configuration of a BERT, SpanBERT or DistilBERT. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        token_types: number of segments that have embeddings; 0: none, as in DistilBERT.
        position: absolute: position embeddings at the input, as in the paper. relative_key, relative_key_query: learned
            relative positions in every layer's scores, multiplied with queries, or with queries and keys.
    """

    family: Literal["bert"] = "bert"
    name: ClassVar[str] = "BERT"
    recipe: ClassVar[str] = "bert-base"
    token_types: int = Field(default=2, ge=0)
    position: Literal["absolute", "relative_key", "relative_key_query"] = "absolute"

    @property
    def position_table_rows(self) -> int:
        return self.max_length if self.position == "absolute" else 0

    def encoder_weight_count(self) -> int:
        relative = 0 if self.position == "absolute" else (2 * self.max_length - 1) * (self.hidden // self.heads)
        return super().encoder_weight_count() + self.layers * relative

    @property
    def has_pair_class(self) -> bool:
        return self.token_types > 0

    def encoder_layers(self) -> "list[EncoderLayer]":
        """Build the layers. With relative positions each layer has its own kernel, which owns their parameters."""
        from encoder_core.layers.relative_key import RelativeKeyAttention

        if self.position == "absolute":
            return encoder_layers(self, self.layers)
        both_sides, width = self.position == "relative_key_query", self.hidden // self.heads
        return encoder_layers(
            self, self.layers, lambda: RelativeKeyAttention(self.max_length, width, both_sides=both_sides)
        )

    def title(self, terms: Collection[str]) -> str:
        if not self.token_types:
            return "DistilBERT"
        return "SpanBERT" if "sbo" in terms else self.name

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        match heads:
            case "mlm" if not self.token_types:
                return HfNetwork("DistilBertForMaskedLM", DISTILBERT_TABLE, distilled_to_json(self))
            case "mlm":
                return HfNetwork("BertForMaskedLM", MASKED_LM, to_json(self))
            case "mlm_pair" if self.token_types:
                return HfNetwork("BertForPreTraining", PRETRAINING, to_json(self))
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (
            ModelType("bert", "BertModel", lambda fields: cls(**CONFIG_JSON.read_settings(fields))),
            ModelType("distilbert", "DistilBertModel", distilled_from_json),
        )


_PAIRS = (  # names of the parameters of the encoder and of its masked-language-model head
    *embedding_pairs("bert.embeddings", token_types=True),
    *layer_pairs("bert.encoder.layer.{layer}"),
    *weight_and_bias("head.dense", "cls.predictions.transform.dense"),
    *weight_and_bias("head.norm", "cls.predictions.transform.LayerNorm"),
    NamePair("head.decoder.bias", "cls.predictions.bias"),
)

_PAIR_HEAD = (
    *weight_and_bias("pair_head.pooler", "bert.pooler.dense"),
    *weight_and_bias("pair_head.classifier", "cls.seq_relationship"),
)

_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")  # constants in files

# The parameters of BertForMaskedLM, and of BertForPreTraining, which also has a pair head.
MASKED_LM = KeyTable(_PAIRS, tied=_TIED, unused=(*_BUFFERS, *(pair.theirs for pair in _PAIR_HEAD)))
PRETRAINING = KeyTable((*_PAIRS, *_PAIR_HEAD), tied=_TIED, unused=_BUFFERS)

CONFIG_JSON = ConfigJson(
    "bert",
    bert_fields() | TABLE_SIZE_FIELDS,
    constants=TIED_DECODER_CONSTANT,
    unwritten=BERT_UNWRITTEN,
)


def to_json(config: BertConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError: the model has relative positions."""
    if config.position != "absolute":
        raise ModelError(
            f"model.position is {config.position!r}, which transformers' BERT no longer supports",
            remedy="train with model.position: absolute to export",
        )
    return CONFIG_JSON.to_fields(config)


_DISTILLED_LAYER = (  # transformers' names of a DistilBERT layer's modules, in the order of `layer_pairs`
    *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
    *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
)

DISTILBERT_TABLE = KeyTable(  # DistilBERT's parameter names
    pairs=(
        *embedding_pairs("distilbert.embeddings"),
        *layer_pairs("distilbert.transformer.layer.{layer}", _DISTILLED_LAYER),
        *weight_and_bias("head.dense", "vocab_transform"),
        *weight_and_bias("head.norm", "vocab_layer_norm"),
        NamePair("head.decoder.bias", "vocab_projector.bias"),
    ),
    tied=("vocab_projector.weight",),
    unused=("distilbert.embeddings.position_ids",),
)

DISTILBERT_CONFIG_JSON = ConfigJson(
    "distilbert",
    {
        "layers": ("n_layers", 6),
        "hidden": ("dim", 768),
        "heads": ("n_heads", 12),
        "feed_forward": ("hidden_dim", 3072),
        "max_length": ("max_position_embeddings", 512),
        "vocab": ("vocab_size", 30_522),
        "pad_id": ("pad_token_id", 0),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "initializer_range": ("initializer_range", 0.02),
        "activation": ("activation", "gelu"),
    },
    constants=TIED_DECODER_CONSTANT,
)

EPSILON = 1e-12  # epsilon of every LayerNorm; transformers' configuration has no field for it


def distilled_to_json(config: BertConfig) -> dict[str, Any]:
    """Return the fields of a DistilBERT's config.json. Raises ModelError: the model has relative positions, or its
    LayerNorm epsilon is not 1e-12."""
    if config.position != "absolute" or config.layer_norm_eps != EPSILON:
        raise ModelError(
            f"the model has position {config.position} and layer_norm_eps {config.layer_norm_eps:g}. A BERT without "
            "token types is exported as DistilBERT, which needs position absolute and layer_norm_eps 1e-12",
            remedy="train with model.position: absolute and model.layer_norm_eps: 1e-12, or with model.token_types: 1",
        )
    return DISTILBERT_CONFIG_JSON.to_fields(config, sinusoidal_pos_embds=False)


def distilled_from_json(fields: dict[str, Any]) -> BertConfig:
    """Return our configuration for a DistilBERT's config.json. Sinusoidal positions are weights, like learned ones."""
    return BertConfig(**DISTILBERT_CONFIG_JSON.read_settings(fields), layer_norm_eps=EPSILON, token_types=0)
