"""BERT (Devlin et al., 2018, arXiv 1810.04805): the encoder of the Transformer, trained to predict masked words.

Earlier models read a text from one side. BERT masks 15 % of the tokens and predicts them from both sides (section
3.1). Its layers are those of Vaswani et al. (2017): attention, then a feed-forward block, each followed by a residual
sum and a LayerNorm (post-norm). The embeddings of word, position and segment are summed.

SpanBERT (Joshi et al., 2020) has the same encoder and another objective. DistilBERT (Sanh et al., 2019, section 3) is
half as deep and has no token types; transformers has a class of its own for it, whose names are at the end of this
file.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    Pair,
    activation_from_json,
    activation_to_json,
    check_tied,
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)

if TYPE_CHECKING:  # torch is imported only where encoders are built: reading a configuration needs none
    from encoder_core.layers.attention import Attend
    from encoder_core.layers.encoder import Embeddings, Encoder


class BertConfig(WithGenerator):
    """The configuration of a BERT, SpanBERT or DistilBERT. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        token_types: number of segments with an embedding of their own; 0 for none (DistilBERT).
        position: absolute embeddings at the input (the paper), or learned relative positions in every layer's scores,
            against the queries (relative_key) or against queries and keys (relative_key_query).
    """

    family: Literal["bert"] = "bert"
    name: ClassVar[str] = "BERT"
    recipe: ClassVar[str] = "bert-base"
    token_types: int = Field(default=2, ge=0)
    position: Literal["absolute", "relative_key", "relative_key_query"] = "absolute"

    @property
    def segments(self) -> int:
        return self.token_types

    @property
    def position_rows(self) -> int:
        return self.token_types + (self.max_length if self.position == "absolute" else 0)

    def encoder_weights(self) -> int:
        relative = (
            0 if self.position == "absolute" else (2 * self.max_length - 1) * (self.hidden // self.heads)
        )
        return super().encoder_weights() + self.layers * relative

    @property
    def has_pair_class(self) -> bool:
        return self.token_types > 0

    def encoder(
        self,
        *,
        embeddings: "Embeddings | None" = None,
        checkpoint_activations: bool = False,
        attend: "Attend | None" = None,
    ) -> "Encoder":
        from encoder_core.layers.encoder import Encoder

        layers = encoder_layers(self, self.layers, _kernels(self, attend))
        return Encoder(embeddings or _embeddings(self), layers, checkpoint_activations=checkpoint_activations)

    def title(self, terms: Collection[str]) -> str:
        if not self.token_types:
            return "DistilBERT"
        return "SpanBERT" if "sbo" in terms else self.name

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        match heads:
            case "mlm" if not self.token_types:
                return HfNetwork("DistilBertForMaskedLM", DISTILLED, distilled_to_json(self))
            case "mlm":
                return HfNetwork("BertForMaskedLM", MASKED_LM, to_json(self))
            case "mlm_pair" if self.token_types:
                return HfNetwork("BertForPreTraining", PRETRAINING, to_json(self))
            case _:
                return None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (
            ModelType("bert", "BertModel", from_json),
            ModelType("distilbert", "DistilBertModel", distilled_from_json),
        )


def _size(layers: int, hidden: int, vocab: int = 30_522) -> BertConfig:
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 64, feed_forward=4 * hidden, vocab=vocab)


TINY = _size(2, 128)
MINI = _size(4, 256)
SMALL = _size(4, 512)
MEDIUM = _size(8, 512)
BASE = _size(12, 768)
LARGE = _size(24, 1024)

DISTILBERT_BASE = _size(6, 768).model_copy(update={"token_types": 0, "initializer": "normal"})
SPANBERT_BASE = _size(12, 768, vocab=28_996).model_copy(update={"initializer": "normal"})
SPANBERT_LARGE = _size(24, 1024, vocab=28_996).model_copy(update={"initializer": "normal"})


def _embeddings(config: BertConfig) -> "Embeddings":
    from encoder_core.layers.encoder import Embeddings

    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=config.max_length if config.position == "absolute" else 0,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


def _kernels(config: BertConfig, attend: "Attend | None") -> "Callable[[], Attend | None]":
    """Return a function that makes the attention kernel of one layer. Relative positions are parameters, so each
    layer has its own.
    """
    from encoder_core.layers.relative_key import RelativeKeyAttention

    if config.position == "absolute":
        return lambda: attend
    both_sides = config.position == "relative_key_query"
    width = config.hidden // config.heads
    return lambda: RelativeKeyAttention(config.max_length, width, both_sides=both_sides)


_PAIRS = (
    *embedding_pairs("encoder.embeddings", "bert.embeddings"),
    Pair("encoder.embeddings.token_type.weight", "bert.embeddings.token_type_embeddings.weight"),
    *layer_pairs("encoder.layers.{layer}", "bert.encoder.layer.{layer}"),
    *with_bias("head.dense", "cls.predictions.transform.dense"),
    *with_bias("head.norm", "cls.predictions.transform.LayerNorm"),
    Pair("head.decoder.bias", "cls.predictions.bias"),
)

_PAIR_HEAD = (
    *with_bias("pair_head.pooler", "bert.pooler.dense"),
    *with_bias("pair_head.classifier", "cls.seq_relationship"),
)

_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")

MASKED_LM = KeyTable(_PAIRS, tied=_TIED, unused=(*_BUFFERS, *(pair.theirs for pair in _PAIR_HEAD)))
PRETRAINING = KeyTable((*_PAIRS, *_PAIR_HEAD), tied=_TIED, unused=_BUFFERS)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}
"""What transformers assumes where a config.json is silent, beyond `interchange.DEFAULTS`."""


def to_json(config: BertConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model.

    Raises:
        ModelError: the model has relative positions.
    """
    if config.position != "absolute":
        raise ModelError(
            f"model.position is {config.position!r}, which transformers' BERT no longer supports",
            remedy="train with model.position: absolute to export",
        )
    return {
        "model_type": "bert",
        **shared_to_json(config),
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
    }


def from_json(fields: dict[str, Any]) -> BertConfig:
    """Return our configuration for the fields of a config.json.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DEFAULTS | fields
    if fields["position_embedding_type"] != "absolute":
        raise ModelError(
            f"config.json: position_embedding_type is {fields['position_embedding_type']!r}",
            remedy="only BERT models with absolute positions can be loaded",
        )
    return BertConfig(
        **shared_from_json(fields),
        max_length=fields["max_position_embeddings"],
        token_types=fields["type_vocab_size"],
    )


_OUR_LAYER, _THEIR_LAYER = "encoder.layers.{layer}", "distilbert.transformer.layer.{layer}"

DISTILLED = KeyTable(
    pairs=(
        *embedding_pairs("encoder.embeddings", "distilbert.embeddings"),
        *with_bias(f"{_OUR_LAYER}.attention.query", f"{_THEIR_LAYER}.attention.q_lin"),
        *with_bias(f"{_OUR_LAYER}.attention.key", f"{_THEIR_LAYER}.attention.k_lin"),
        *with_bias(f"{_OUR_LAYER}.attention.value", f"{_THEIR_LAYER}.attention.v_lin"),
        *with_bias(f"{_OUR_LAYER}.attention.output", f"{_THEIR_LAYER}.attention.out_lin"),
        *with_bias(f"{_OUR_LAYER}.attention_norm", f"{_THEIR_LAYER}.sa_layer_norm"),
        *with_bias(f"{_OUR_LAYER}.feed_forward.up", f"{_THEIR_LAYER}.ffn.lin1"),
        *with_bias(f"{_OUR_LAYER}.feed_forward.down", f"{_THEIR_LAYER}.ffn.lin2"),
        *with_bias(f"{_OUR_LAYER}.feed_forward_norm", f"{_THEIR_LAYER}.output_layer_norm"),
        *with_bias("head.dense", "vocab_transform"),
        *with_bias("head.norm", "vocab_layer_norm"),
        Pair("head.decoder.bias", "vocab_projector.bias"),
    ),
    tied=("vocab_projector.weight",),
    unused=("distilbert.embeddings.position_ids",),
)

DISTILLED_FIELDS = {
    "layers": "n_layers",
    "hidden": "dim",
    "heads": "n_heads",
    "feed_forward": "hidden_dim",
    "max_length": "max_position_embeddings",
    "vocab": "vocab_size",
    "pad_id": "pad_token_id",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
}
"""Our configuration fields and theirs, where only the name differs."""

DISTILLED_DEFAULTS: dict[str, Any] = {
    "n_layers": 6,
    "dim": 768,
    "n_heads": 12,
    "hidden_dim": 3072,
    "max_position_embeddings": 512,
    "vocab_size": 30_522,
    "pad_token_id": 0,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "initializer_range": 0.02,
    "activation": "gelu",
    "sinusoidal_pos_embds": False,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config.json is silent."""

EPSILON = 1e-12  # epsilon of every LayerNorm; transformers' configuration has no field for it


def distilled_to_json(config: BertConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the model as a DistilBERT.

    Raises:
        ModelError: the model has relative positions, or another LayerNorm epsilon than 1e-12.
    """
    if config.position != "absolute" or config.layer_norm_eps != EPSILON:
        raise ModelError(
            f"the model has position {config.position} and layer_norm_eps {config.layer_norm_eps:g}, but without token "
            "types it is exported as transformers' DistilBERT, which needs position absolute and layer_norm_eps 1e-12",
            remedy="train with model.position: absolute and model.layer_norm_eps: 1e-12, or with model.token_types: 1",
        )
    return {
        "model_type": "distilbert",
        **{theirs: getattr(config, ours) for ours, theirs in DISTILLED_FIELDS.items()},
        "activation": activation_to_json(config.activation),
        "sinusoidal_pos_embds": False,
        "tie_word_embeddings": True,
    }


def distilled_from_json(fields: dict[str, Any]) -> BertConfig:
    """Return our configuration for the fields of a DistilBERT's config.json. Sinusoidal positions are part of the
    weights, like learned ones.

    Raises:
        ModelError: the model has features that we do not support.
    """
    fields = DISTILLED_DEFAULTS | fields
    check_tied(fields)
    values = {ours: fields[theirs] for ours, theirs in DISTILLED_FIELDS.items()}
    return BertConfig(
        **values,
        activation=activation_from_json(fields, "activation"),
        layer_norm_eps=EPSILON,
        token_types=0,
    )
