"""A transformers class as a whole: its configuration, its parameters, and ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from encoder_core.errors import ModelError
from encoder_core.families.build import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.hf import deberta, roberta
from encoder_core.families.hf.keys import KeyTable
from encoder_core.families.roberta import RobertaConfig


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


def interchange(config: ModelConfig) -> Interchange:
    """The class of transformers that holds this model and its masked-language-model head."""
    match config:
        case RobertaConfig():
            return Interchange(roberta.ARCHITECTURE, roberta.TABLE, roberta.to_json(config), config.layers)
        case DebertaConfig() | DebertaV2Config():
            architecture, table = deberta.ARCHITECTURES[config.family], deberta.table(config)
            return Interchange(architecture, table, deberta.to_json(config), config.layers)
        case _ as never:
            assert_never(never)


_READERS: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "roberta": roberta.from_json,
    "deberta": deberta.from_json,
    "deberta-v2": deberta.from_json,
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
