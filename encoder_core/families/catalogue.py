"""The list of model families. To add a family, import its configuration here and add it to `ModelConfig`.

`hf_format_of` and `read_config` convert the configuration of any family to transformers' format and back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from pydantic import Field, ValidationError

from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.config import EncoderConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig, add_detection_head
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.interchange import Heads, HfNetwork, ModelType
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig

ModelConfig = Annotated[
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
    | XlnetConfig
    | BartConfig,
    Field(discriminator="family"),
]
"""The configuration of any family, as a union that pydantic discriminates by the `family` field."""

FAMILIES: tuple[type[ModelConfig], ...] = get_args(get_args(ModelConfig)[0])


def family_names_where(predicate: Callable[[type[EncoderConfig]], bool]) -> str:
    """Return the names of the families for which `predicate` is true, joined by "or", for an error's remedy."""
    return " or ".join(family.model_fields["family"].default for family in FAMILIES if predicate(family))


def embedded_languages(config: ModelConfig) -> tuple[str, ...]:
    """Return the languages that have embeddings in the model, in the order of the table; empty except for XLM."""
    return config.languages if isinstance(config, XlmConfig) and config.language_table_rows else ()


def uses_mask_decoder(config: ModelConfig) -> bool:
    """Return whether the model predicts masked tokens with DeBERTa's enhanced mask decoder."""
    return isinstance(config, DebertaConfig | DebertaV2Config) and config.mask_decoder == "enhanced"


@dataclass(frozen=True)
class HfFormat(HfNetwork):
    """A model in transformers' format.

    Attributes:
        layers: number of distinct layers, to which `table` applies.
    """

    layers: int


def hf_format_of(config: ModelConfig, heads: Heads = "mlm") -> HfFormat:
    """Return transformers' format of this encoder with these heads.

    Raises:
        ModelError: transformers has no class for it.
    """
    its = _hf_network(config, heads)
    named = {} if its.architecture is None else {"architectures": [its.architecture]}
    return HfFormat(its.architecture, its.table, named | its.fields, config.distinct_layer_count)


def hf_equivalent(config: ModelConfig) -> ModelConfig:
    """Return `config`; for a NeoBERT, which transformers lacks, the EuroBERT of the same encoder and weights."""
    if not isinstance(config, NeoBertConfig):
        return config
    # EuroBERT has NeoBERT's layers: RMSNorms before each block, rotary positions on halves of heads, SwiGLU.
    return EuroBertConfig(**config.model_dump(include=EuroBertConfig.model_fields.keys() - {"family"}))


def _hf_network(config: ModelConfig, heads: Heads) -> HfNetwork:
    """Return transformers' format of the network. Raises ModelError: see `hf_format_of`."""
    if heads == "none":
        its = _hf_network(config, config.main_heads)
        table = its.table if config.has_decoder else its.table.without_heads()
        return HfNetwork(_encoder_class_name(its), table, its.fields)
    found = config.hf_network(heads)
    # If transformers has no class with a detection head: the family's encoder, with ELECTRA's head.
    if found is None and heads == "rtd":
        its = _hf_network(config, "mlm")
        found = HfNetwork(_encoder_class_name(its), add_detection_head(its.table.without_heads()), its.fields)
    if found is None:
        raise ModelError(
            f"transformers has no class for {config.family} with the heads {heads!r}",
            remedy="export the encoder with its masked-language-model head (mlm)",
        )
    return found


_TYPES: dict[str, ModelType] = {its.model_type: its for family in FAMILIES for its in family.model_types()}


def _encoder_class_name(network: HfNetwork) -> str | None:
    """Return the name of transformers' class of the encoder alone; None if transformers has none."""
    return _TYPES[network.fields["model_type"]].encoder


TYPES_WITHOUT_HF_CLASS = tuple(name for name, its in _TYPES.items() if its.encoder is None)
"""Model types that we can load although transformers has no class for them."""

_MAX_LAYERS = 10_000
"""Largest number of layers that is accepted: the names of absurdly many layers would fill the memory."""
_MALFORMED_CONFIG_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors that config.json fields of a wrong type may raise, such as text instead of a number; files are untrusted."""


_MISSING_FEATURES = {
    "qwen3": "norms of queries and keys, and a head width that is not hidden_size / num_attention_heads",
    **dict.fromkeys(
        ("gemma3", "gemma3_text"),
        "norms of queries and keys, norms after blocks, scaled embeddings and norms",
    ),
}
"""Features that our layers lack, by the model type of decoders that users may try to load."""


def read_config(fields: dict[str, Any]) -> ModelConfig:
    """Return our configuration for the fields of a config.json.

    Raises:
        ModelError: the model type is not supported, or a field has a value of a wrong type.
        ValidationError: a value is out of range.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        lacking = _MISSING_FEATURES.get(str(model_type))
        reason = "" if lacking is None else f" (it has {lacking})"
        raise ModelError(
            f"config.json: model_type is {model_type!r}, which is not supported{reason}",
            remedy=f"use a model of type {', '.join(_TYPES)}",
        )
    padded = fields.get("pad_token_id", 0) is not None
    stated_fields = fields if padded else {name: fields[name] for name in fields.keys() - {"pad_token_id"}}
    try:
        config = cast(ModelConfig, _TYPES[model_type].read(stated_fields))
    except (ModelError, ValidationError):
        raise
    except _MALFORMED_CONFIG_ERRORS as error:
        raise ModelError(
            f"config.json: a field of this {model_type} has a value of a wrong type: {error}",
            remedy="compare the file with a published config.json of this model type",
        ) from error
    if not padded and config.offsets_positions_by_padding:
        raise ModelError(
            f"config.json: pad_token_id is null, but the positions of a {model_type} are counted from it",
            remedy="set pad_token_id to the padding id with which the model was trained (1 in published models)",
        )
    if config.layers > _MAX_LAYERS:
        raise ModelError(
            f"config.json has {config.layers:,} layers", remedy=f"use a model of at most {_MAX_LAYERS:,} layers"
        )
    return config
