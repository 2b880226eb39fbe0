"""From a model configuration to its encoder, whatever the family.

A transformers class as a whole: its configuration, its parameters, and ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families import (
    albert,
    bert,
    deberta,
    electra,
    eurobert,
    modernbert,
    pre_norm,
    roberta,
    xlm,
    xlnet,
)
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.interchange import KeyTable
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.encoder import Embeddings, Encoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder

ModelConfig = Annotated[
    BertConfig
    | RobertaConfig
    | AlbertConfig
    | ElectraConfig
    | DebertaConfig
    | DebertaV2Config
    | XlnetConfig
    | ModernBertConfig
    | EuroBertConfig
    | XlmConfig,
    Field(discriminator="family"),
]
"""The configuration of any family, told apart by its `family` field."""

DetectorConfig = (
    BertConfig
    | RobertaConfig
    | AlbertConfig
    | ElectraConfig
    | DebertaConfig
    | DebertaV2Config
    | ModernBertConfig
    | EuroBertConfig
    | XlmConfig
)
"""Families that have a `generator`, a smaller one of their kind on the same embeddings."""


def language_table(config: ModelConfig) -> tuple[str, ...]:
    """The languages that the model has embeddings of, in their order; empty in most families."""
    return config.languages if isinstance(config, XlmConfig) and config.language_table else ()


AnyEncoder = Encoder | DisentangledEncoder | TwoStreamEncoder
"""Batch to hidden states [T, H], with the input embeddings as `embeddings`."""


def build_encoder(
    config: ModelConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> AnyEncoder:
    """The family's encoder, weights not yet initialised. Raises ModelError if the vocabulary is unknown.

    `embeddings`: shared with another network of the family, if given; XLNet shares none. `attend` is the kernel of
    plain attention; disentangled and two-stream attention have their own.
    """
    match config:
        case BertConfig():
            return bert.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case AlbertConfig():
            return albert.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case ElectraConfig():
            return electra.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case RobertaConfig():
            return roberta.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case XlmConfig():
            return xlm.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case DebertaConfig() | DebertaV2Config():
            return deberta.build(config, embeddings=embeddings, checkpoint_activations=checkpoint_activations)
        case XlnetConfig():
            return xlnet.build(config, checkpoint_activations=checkpoint_activations)
        case PreNormConfig():
            return pre_norm.build(
                config, embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend
            )
        case _ as never:
            assert_never(never)


Heads = Literal["mlm", "mlm_pair", "rtd", "plm", "none"]
"""What sits on the encoder: the masked-language-model head, that and a pair head, ELECTRA's detection head, XLNet's
head for permuted tokens, or nothing."""


@dataclass(frozen=True)
class Interchange:
    """How one model is written in transformers' format.

    Attributes:
        architecture: the class that loads it.
        table: names of its parameters.
        fields: its config.json.
        layers: distinct layers, for expanding `table`.
    """

    architecture: str
    table: KeyTable
    fields: dict[str, Any]
    layers: int


def interchange(config: ModelConfig, heads: Heads = "mlm") -> Interchange:
    """The class of transformers that holds this encoder and these heads. Raises ModelError if there is none."""
    architecture, table, fields = _described(config, heads)
    described = {"architectures": [architecture]} | fields
    return Interchange(architecture, table, described, config.distinct_layers)


def _described(config: ModelConfig, heads: Heads) -> tuple[str, KeyTable, dict[str, Any]]:
    """Architecture, key table and config.json."""
    match config, heads:
        case _, "none":
            _, table, fields = _described(config, _HEADS.get(config.family, "mlm"))
            return _ALONE[fields["model_type"]], table.encoder(), fields
        case BertConfig(token_types=0), "mlm":
            return "DistilBertForMaskedLM", bert.DISTILLED, bert.distilled_to_json(config)
        case BertConfig(), "mlm":
            return "BertForMaskedLM", bert.MASKED_LM, bert.to_json(config)
        case BertConfig(), "mlm_pair" if config.token_types:
            return "BertForPreTraining", bert.PRETRAINING, bert.to_json(config)
        case AlbertConfig(), "mlm":
            return "AlbertForMaskedLM", albert.MASKED_LM, albert.to_json(config)
        case AlbertConfig(), "mlm_pair":
            return "AlbertForPreTraining", albert.PRETRAINING, albert.to_json(config)
        case ElectraConfig(), "mlm":
            return "ElectraForMaskedLM", electra.masked_lm(config), electra.to_json(config)
        case ElectraConfig(), "rtd":
            return "ElectraForPreTraining", electra.detection(config), electra.to_json(config)
        case RobertaConfig(), "mlm":
            return "RobertaForMaskedLM", roberta.TABLE, roberta.to_json(config)
        case ModernBertConfig(), "mlm":
            return "ModernBertForMaskedLM", modernbert.TABLE, modernbert.to_json(config)
        case EuroBertConfig(), "mlm":
            return "EuroBertForMaskedLM", eurobert.TABLE, eurobert.to_json(config)
        case XlmConfig(), "mlm":
            return "XLMWithLMHeadModel", xlm.table(config), xlm.to_json(config)
        case ((DebertaConfig() | DebertaV2Config()), "mlm"):
            return deberta.ARCHITECTURES[config.family], deberta.table(config), deberta.to_json(config)
        case ((DebertaConfig() | DebertaV2Config()), "rtd"):
            fields = deberta.to_json(config)
            return _ALONE[fields["model_type"]], deberta.detection(config), fields
        case (
            (
                BertConfig()
                | AlbertConfig()
                | RobertaConfig()
                | ModernBertConfig()
                | EuroBertConfig()
                | XlmConfig()
            ),
            "rtd",
        ):
            _, table, fields = _described(config, "mlm")
            return _ALONE[fields["model_type"]], electra.with_detection(table.encoder()), fields
        case XlnetConfig(), "plm":
            return xlnet.ARCHITECTURE, xlnet.TABLE, xlnet.to_json(config)
        case XlnetConfig(), _:
            raise ModelError(
                "xlnet has no masked-language-model head: it predicts tokens in an order, not behind masks",
                remedy="use a model that was trained with masks; XLNet is exported with its own head (plm)",
            )
        case _:
            raise ModelError(
                f"transformers has no class for {config.family} with the heads {heads!r}",
                remedy="export the encoder with its masked-language-model head",
            )


_ALONE = {  # by their model_type
    "bert": "BertModel",
    "distilbert": "DistilBertModel",
    "albert": "AlbertModel",
    "electra": "ElectraModel",
    "roberta": "RobertaModel",
    "deberta": "DebertaModel",
    "deberta-v2": "DebertaV2Model",
    "xlnet": "XLNetModel",
    "modernbert": "ModernBertModel",
    "eurobert": "EuroBertModel",
    "xlm": "XLMModel",
}
_HEADS: dict[str, Heads] = {"electra": "rtd", "xlnet": "plm"}  # of the network that goes on to other tasks

_READERS: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "bert": bert.from_json,
    "distilbert": bert.distilled_from_json,
    "albert": albert.from_json,
    "electra": electra.from_json,
    "roberta": roberta.from_json,
    "deberta": deberta.from_json,
    "deberta-v2": deberta.from_json,
    "xlnet": xlnet.from_json,
    "modernbert": modernbert.from_json,
    "eurobert": eurobert.from_json,
    "xlm": xlm.from_json,
}


def read_config(fields: dict[str, Any]) -> ModelConfig:
    """Our configuration for a config.json. Raises ModelError for a model type that we do not have."""
    model_type = fields.get("model_type")
    if model_type not in _READERS:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, which is not supported",
            remedy=f"use one of {', '.join(_READERS)}",
        )
    return _READERS[model_type](fields)
