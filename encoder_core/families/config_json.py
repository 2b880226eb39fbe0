"""Tables that map a configuration's fields to those of transformers' config.json and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from encoder_core.errors import ModelError
from encoder_core.layers.sizes import Activation

ACTIVATIONS: dict[str, Activation] = {  # our names of activations, by transformers' names
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

JsonFields = Mapping[str, tuple[str, Any]]
"""By our fields: transformers' name of the field, and transformers' default, which holds if a config.json lacks it."""

ONLY_ENCODERS = "use an encoder; decoders cannot be loaded"
TIED_DECODER_CONSTANT = {
    "tie_word_embeddings": (True, "use a model whose decoder is tied to the word embeddings"),
}


@dataclass(frozen=True)
class ConfigJson:
    """The config.json of one model type: how it is written from our configuration, and read.

    Attributes:
        model_type: name of the model type.
        fields: fields with the same value here and there, and `activation`, whose value is translated.
        constants: transformers' fields that must have one value, which we write: (value, remedy for other values).
        unwritten: like `constants`, but `to_fields` does not add them: the value is transformers' default.
        defaults: transformers' defaults of further fields, and of constants whose default is not the value.
    """

    model_type: str
    fields: JsonFields
    constants: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    unwritten: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def to_fields(self, config: object, **further: Any) -> dict[str, Any]:
        """Return the model's fields of config.json: `fields`, `constants` and `further`."""
        named = {theirs: getattr(config, ours) for ours, (theirs, _) in self.fields.items()}
        if "activation" in self.fields:
            named[self.fields["activation"][0]] = activation_to_json(named[self.fields["activation"][0]])
        fixed = {name: value for name, (value, _) in self.constants.items()}
        return {"model_type": self.model_type} | named | fixed | further

    def fill_defaults(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json, with transformers' defaults for missing fields.

        Raises:
            ModelError: a constant field has another value.
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
        """Return the values of our configuration's `fields`, given a config.json with all defaults filled in.

        Raises:
            ModelError: the activation is not supported.
        """
        found = {ours: complete[theirs] for ours, (theirs, _) in self.fields.items()}
        if "activation" in found:
            found["activation"] = activation_from_json(complete, self.fields["activation"][0])
        return found

    def read_settings(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of our configuration's `fields`, given a config.json as stored."""
        return self.to_settings(self.fill_defaults(fields))


def bert_fields(**defaults: Any) -> dict[str, tuple[str, Any]]:
    """Return the fields that BERT shares with similar classes. `defaults`: by our name, if they differ from BERT's."""
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
"""The fields for the sizes of the tables of positions and token types, in classes where they equal our settings."""
ENCODER_FLAGS = dict.fromkeys(("is_decoder", "add_cross_attention"), (False, ONLY_ENCODERS))  # must be false
BERT_UNWRITTEN = {
    **ENCODER_FLAGS,
    # transformers 4 has relative positions in BERT and in classes like it, transformers 5 in none.
    "position_embedding_type": ("absolute", "use a model with absolute positions"),
}


def activation_from_json(fields: Mapping[str, Any], key: str) -> Activation:
    """Return our name of the activation that `fields[key]` names.

    Raises:
        ModelError: the activation is not supported.
    """
    if fields[key] not in ACTIVATIONS:
        raise unsupported_value_error(key, fields, f"use a model with one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[fields[key]]


def activation_to_json(activation: Activation) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def unsupported_value_error(key: str, fields: Mapping[str, Any], remedy: str) -> ModelError:
    """Return the error for a config.json whose field `key` has a value that we do not support."""
    value = fields.get(key)
    shown_value = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return ModelError(f"config.json: {key} is {shown_value}, which is not supported", remedy=remedy)


def published_value(key: str, value: object) -> tuple[object, str]:
    """Return (value, remedy) for a field that has one value in all published weights; see `ConfigJson.constants`."""
    return value, f"use weights of the published architecture, whose {key} is {value!r}"
