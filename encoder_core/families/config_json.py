"""How a configuration is written in config.json: a table of fields that is read in both directions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from encoder_core.errors import ModelError
from encoder_core.layers.sizes import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

JsonFields = Mapping[str, tuple[str, Any]]
"""Our configuration fields: their name for each, and what they assume where a config.json is silent."""

ONLY_ENCODERS = "only encoders can be loaded"
TIED_DECODER_CONSTANT = {
    "tie_word_embeddings": (True, "only models whose decoder is tied to the word embeddings can be loaded"),
}


@dataclass(frozen=True)
class ConfigJson:
    """How the configuration of one model type is written in config.json, and read from it.

    Attributes:
        model_type: name of the model type.
        fields: fields of which only the name differs, and the activation.
        constants: their fields that we support with one value only, and write; with the remedy for other values.
        unwritten: the same for fields that we do not write.
        defaults: what they assume of further fields, or of constants, where it is not the constant's value.
    """

    model_type: str
    fields: JsonFields
    constants: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    unwritten: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def to_fields(self, config: object, **further: Any) -> dict[str, Any]:
        """Return the fields of config.json that describe the model, `further` ones among them."""
        named = {theirs: getattr(config, ours) for ours, (theirs, _) in self.fields.items()}
        if "activation" in self.fields:
            named[self.fields["activation"][0]] = activation_to_json(named[self.fields["activation"][0]])
        fixed = {name: value for name, (value, _) in self.constants.items()}
        return {"model_type": self.model_type} | named | fixed | further

    def fill_defaults(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json and what it is silent about.

        Raises:
            ModelError: a field has a value that we do not support.
        """
        expected = {**self.unwritten, **self.constants}
        silent = {name: value for name, (value, _) in expected.items()} | dict(self.fields.values())
        complete: dict[str, Any] = {**silent, **self.defaults, **fields}
        for name, (value, remedy) in expected.items():
            given = complete[name]
            if (bool(given) if isinstance(value, bool) else given) != value:
                raise unsupported_value_error(name, complete, remedy)
        return complete

    def to_settings(self, complete: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our configuration's `fields`.

        Raises:
            ModelError: the activation is not supported.
        """
        found = {ours: complete[theirs] for ours, (theirs, _) in self.fields.items()}
        if "activation" in found:
            found["activation"] = activation_from_json(complete, self.fields["activation"][0])
        return found

    def read_settings(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return `to_settings` of a config.json as it is."""
        return self.to_settings(self.fill_defaults(fields))


def bert_fields(**defaults: Any) -> dict[str, tuple[str, Any]]:
    """Return the fields of all classes that were made from BERT's; `defaults`, by our name, differ from BERT's."""
    fields: dict[str, tuple[str, Any]] = {
        "layers": ("num_hidden_layers", 12),
        "hidden": ("hidden_size", 768),
        "heads": ("num_attention_heads", 12),
        "feed_forward": ("intermediate_size", 3072),
        "vocab": ("vocab_size", 30_522),
        "pad_id": ("pad_token_id", 0),
        "dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "initializer_range": ("initializer_range", 0.02),
        "activation": ("hidden_act", "gelu"),
    }
    return {ours: (theirs, defaults.get(ours, default)) for ours, (theirs, default) in fields.items()}


TABLE_SIZE_FIELDS = {"max_length": ("max_position_embeddings", 512), "token_types": ("type_vocab_size", 2)}
"""Fields of classes whose tables of positions and token types are as long as these numbers."""
ENCODER_FLAGS = dict.fromkeys(("is_decoder", "add_cross_attention"), (False, ONLY_ENCODERS))


def activation_from_json(fields: Mapping[str, Any], key: str) -> Activation:
    """Return our name of the activation in `fields[key]`.

    Raises:
        ModelError: the activation is not supported.
    """
    if fields[key] not in ACTIVATIONS:
        raise unsupported_value_error(key, fields, f"use a model with one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[fields[key]]


def activation_to_json(activation: Activation) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def unsupported_value_error(key: str, fields: Mapping[str, Any], remedy: str) -> ModelError:
    """Return the error about a config.json whose `key` has a value that we do not support."""
    value = fields.get(key)
    shown_value = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return ModelError(f"config.json: {key} is {shown_value}, which is not supported", remedy=remedy)


def published_value(key: str, value: object) -> tuple[object, str]:
    """Return the only value of a field, and the remedy, where weights must be of the published architecture."""
    return value, f"use weights of the published architecture, whose {key} is {value!r}"
