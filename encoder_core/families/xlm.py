"""XLM (Conneau and Lample, 2019, arXiv 1901.07291): BERT for many languages at once.

Language embeddings replace token types: in translation language modelling (section 3.4) a row is a sentence and its
translation. The decoder follows the last states directly, without another layer.

transformers' class has an embedding for padding, which no token uses. Given token types, it adds the word embeddings of
these ids; we have no token types.
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from encoder_core.errors import ModelError
from encoder_core.families.config import WithGenerator
from encoder_core.families.config_json import ONLY_ENCODERS, TIED_DECODER_CONSTANT, ConfigJson, unsupported_value_error
from encoder_core.families.interchange import (
    Heads,
    HfNetwork,
    KeyTable,
    ModelType,
    NamePair,
    layer_pairs,
    weight_and_bias,
)
from encoder_core.layers.sizes import Initializer

INNER_RATIO = 4  # feed-forward inner width / `hidden`, fixed in the official code and in transformers' class


class XlmConfig(WithGenerator):
    """The configuration of an XLM. See `EncoderConfig` and `WithGenerator`.

    Attributes:
        languages: names of languages, in the order of their embeddings. With fewer than two, there are no language
            embeddings.
    """

    family: Literal["xlm"] = "xlm"
    name: ClassVar[str] = "XLM"
    recipe: ClassVar[str] = "xlm-mlm-tlm-base"
    pad_id: int = Field(default=2, ge=0)
    initializer: Initializer = "normal"
    languages: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_languages_differ(self) -> Self:
        if len(set(self.languages)) < len(self.languages):
            raise ValueError(f"languages ({', '.join(self.languages)}) must differ from each other")
        return self

    @model_validator(mode="after")
    def _check_inner_width(self) -> Self:
        if self.feed_forward != INNER_RATIO * self.hidden:
            raise ValueError(
                f"feed_forward ({self.feed_forward}) must be {INNER_RATIO} x hidden ({INNER_RATIO * self.hidden}): "
                "XLM fixes this ratio"
            )
        return self

    @property
    def has_bare_decoder_head(self) -> bool:
        return True

    @property
    def has_decoder_bias(self) -> bool:
        return True

    @property
    def language_table_rows(self) -> int:
        return len(self.languages) if len(self.languages) > 1 else 0

    def hf_network(self, heads: Heads) -> HfNetwork | None:
        return HfNetwork("XLMWithLMHeadModel", key_table(self), to_json(self)) if heads == "mlm" else None

    @classmethod
    def model_types(cls) -> tuple[ModelType, ...]:
        return (ModelType("xlm", "XLMModel", from_json),)


_LAYER = (  # transformers' names of a layer's modules, in the order that `layer_pairs` expects
    *("attentions.{layer}.q_lin", "attentions.{layer}.k_lin", "attentions.{layer}.v_lin"),
    *("attentions.{layer}.out_lin", "layer_norm1.{layer}"),
    *("ffns.{layer}.lin1", "ffns.{layer}.lin2", "layer_norm2.{layer}"),
)
_LANGUAGES = NamePair("encoder.embeddings.language.weight", "transformer.lang_embeddings.weight")
_PAIRS = (  # names of all parameters but the language embeddings
    NamePair("encoder.embeddings.word.weight", "transformer.embeddings.weight"),
    NamePair("encoder.embeddings.position.weight", "transformer.position_embeddings.weight"),
    *weight_and_bias("encoder.embeddings.norm", "transformer.layer_norm_emb"),
    *layer_pairs("transformer", _LAYER),
    NamePair("head.decoder.bias", "pred_layer.proj.bias"),
)

CONFIG_JSON = ConfigJson(
    "xlm",
    {
        "layers": ("n_layers", 12),
        "hidden": ("emb_dim", 2048),
        "heads": ("n_heads", 16),
        "max_length": ("max_position_embeddings", 512),
        "vocab": ("vocab_size", 30_145),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "initializer_range": ("init_std", 0.02),
    },
    constants={
        **TIED_DECODER_CONSTANT,
        "sinusoidal_embeddings": (False, "use a model with learned positions"),
        "causal": (False, "use a model with bidirectional attention"),
        "asm": (False, "use a model without adaptive softmax"),
        "gelu_activation": (True, "use an encoder with GELU"),
    },
    unwritten={"is_encoder": (True, ONLY_ENCODERS)},
    defaults={"n_langs": 1, "use_lang_emb": True, "pad_token_id": 2},
)


def key_table(config: XlmConfig) -> KeyTable:
    """Return the names of the parameters, including language embeddings if the model has them."""
    pairs = (*_PAIRS, _LANGUAGES) if config.language_table_rows else _PAIRS
    return KeyTable(pairs, tied=("pred_layer.proj.weight",), unused=("transformer.position_ids",))


def to_json(config: XlmConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raises ModelError: transformers' class does not support the activation."""
    if config.activation != "gelu":
        raise ModelError(
            f"model.activation is {config.activation}, but transformers' XLM supports the exact GELU only",
            remedy="train with model.activation: gelu to export",
        )
    ids = {name: number for number, name in enumerate(config.languages)}
    return CONFIG_JSON.to_fields(
        config,
        embed_init_std=config.initializer_range,
        n_langs=max(1, len(config.languages)),
        use_lang_emb=config.language_table_rows > 0,
        lang2id=ids,
        id2lang={str(number): name for name, number in ids.items()},
        pad_index=config.pad_id,
        pad_token_id=config.pad_id,
    )


def from_json(fields: dict[str, Any]) -> XlmConfig:
    """Return our configuration for the fields of a config.json. A language without a name is named by its number."""
    fields = CONFIG_JSON.fill_defaults(fields)
    # transformers 4 has the padding id as `pad_index`, 5 as `pad_token_id`, which may be null.
    named = (fields.get("pad_index"), fields["pad_token_id"], CONFIG_JSON.defaults["pad_token_id"])
    return XlmConfig(
        **CONFIG_JSON.to_settings(fields),
        feed_forward=INNER_RATIO * fields["emb_dim"],
        pad_id=next(id_ for id_ in named if id_ is not None),
        languages=_languages(fields),
    )


_MAX_LANGUAGES = 100_000
"""Largest accepted number of languages, more than exist: the names of absurdly many would fill the memory."""


def _languages(fields: dict[str, Any]) -> tuple[str, ...]:
    """Return the languages' names: all with embeddings; without embeddings, only the name of a single language."""
    count, names = fields["n_langs"], {number: name for name, number in (fields.get("lang2id") or {}).items()}
    if count > _MAX_LANGUAGES:
        raise unsupported_value_error("n_langs", fields, f"use a model of at most {_MAX_LANGUAGES:,} languages")
    if not fields["use_lang_emb"] or count < 2:
        return tuple(names.values()) if len(names) == 1 else ()
    return tuple(str(names.get(number, number)) for number in range(count))
