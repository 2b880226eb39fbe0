"""The list of families: a new one is imported here and joins a union. All else follows from its configuration.

A configuration of any of them becomes an encoder (`build_encoder`), is written for transformers (`interchange`), and is
read from there (`read_config`).
"""

from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from pydantic import Field

from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.config import AnyEncoder as AnyEncoder
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig, with_detection
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.interchange import Format, Heads, KeyTable, Written
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings

DetectorConfig = (
    BertConfig
    | RobertaConfig
    | AlbertConfig
    | ElectraConfig
    | DebertaConfig
    | DebertaV2Config
    | ModernBertConfig
    | EuroBertConfig
    | NeoBertConfig
    | XlmConfig
)
"""Families that have a `generator`, a smaller one of their kind on the same embeddings."""

ModelConfig = Annotated[DetectorConfig | XlnetConfig, Field(discriminator="family")]
"""The configuration of any family, told apart by its `family` field."""

FAMILIES: tuple[type[DetectorConfig | XlnetConfig], ...] = (*get_args(DetectorConfig), XlnetConfig)


def language_table(config: ModelConfig) -> tuple[str, ...]:
    """The languages that the model has embeddings of, in their order; empty in most families."""
    return config.languages if isinstance(config, XlmConfig) and config.language_table else ()


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
    return config.encoder(embeddings=embeddings, checkpoint_activations=checkpoint_activations, attend=attend)


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
    its = _written(config, heads)
    described = {"architectures": [its.architecture]} | its.fields
    return Interchange(its.architecture, its.table, described, config.distinct_layers)


def _written(config: ModelConfig, heads: Heads) -> Written:
    if heads == "none":
        its = _written(config, config.main_heads)
        return Written(_alone(its), its.table.encoder(), its.fields)
    found = config.written(heads)
    if found is None and heads == "rtd":  # a family without a class for it: its encoder, and ELECTRA's head
        its = _written(config, "mlm")
        found = Written(_alone(its), with_detection(its.table.encoder()), its.fields)
    if found is None:
        raise ModelError(
            f"transformers has no class for {config.family} with the heads {heads!r}",
            remedy="export the encoder with its masked-language-model head",
        )
    return found


_FORMATS: dict[str, Format] = {its.model_type: its for family in FAMILIES for its in family.formats()}


def _alone(its: Written) -> str:
    """The class that holds the encoder alone."""
    return _FORMATS[its.fields["model_type"]].encoder


def read_config(fields: dict[str, Any]) -> ModelConfig:
    """Our configuration for a config.json. Raises ModelError for a model type that we do not have."""
    model_type = fields.get("model_type")
    if model_type not in _FORMATS:
        raise ModelError(
            f"config.json: model_type is {model_type!r}, which is not supported",
            remedy=f"use one of {', '.join(_FORMATS)}",
        )
    return cast(ModelConfig, _FORMATS[model_type].read(fields))
