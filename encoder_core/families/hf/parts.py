"""Key pairs and configuration fields that the BERT-like classes of transformers have in common."""

from typing import Any

from encoder_core.errors import ModelError
from encoder_core.families.config import EncoderConfig
from encoder_core.families.hf.keys import Pair
from encoder_core.layers.encoder import Activation

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab": "vocab_size",
    "pad_id": "pad_token_id",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
}
"""Our configuration fields and theirs, where only the name differs."""

DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config.json is silent, the same for all these classes."""


def with_bias(ours: str, theirs: str) -> tuple[Pair, Pair]:
    """The weight and bias of one Linear or LayerNorm."""
    return Pair(f"{ours}.weight", f"{theirs}.weight"), Pair(f"{ours}.bias", f"{theirs}.bias")


def layer_pairs(ours: str, theirs: str) -> tuple[Pair, ...]:
    """One post-LayerNorm layer, named as BERT names it; prefixes hold `{layer}` where there are several."""
    return (
        *with_bias(f"{ours}.attention.query", f"{theirs}.attention.self.query"),
        *with_bias(f"{ours}.attention.key", f"{theirs}.attention.self.key"),
        *with_bias(f"{ours}.attention.value", f"{theirs}.attention.self.value"),
        *with_bias(f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
        *with_bias(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
        *with_bias(f"{ours}.feed_forward.up", f"{theirs}.intermediate.dense"),
        *with_bias(f"{ours}.feed_forward.down", f"{theirs}.output.dense"),
        *with_bias(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm"),
    )


def embedding_pairs(ours: str, theirs: str) -> tuple[Pair, ...]:
    """Word and position tables and their LayerNorm."""
    return (
        Pair(f"{ours}.word.weight", f"{theirs}.word_embeddings.weight"),
        Pair(f"{ours}.position.weight", f"{theirs}.position_embeddings.weight"),
        *with_bias(f"{ours}.norm", f"{theirs}.LayerNorm"),
    )


def shared_to_json(config: EncoderConfig) -> dict[str, Any]:
    """The fields of config.json that all these classes share."""
    return {
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "hidden_act": activation_to_json(config.activation),
        "tie_word_embeddings": True,
    }


def shared_from_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Values for our configuration. Raises ModelError for a decoder or an activation that we do not have."""
    fields = DEFAULTS | fields
    for flag in ("is_decoder", "add_cross_attention"):
        if fields.get(flag):
            raise ModelError(f"config.json: {flag} is true", remedy="only encoders can be loaded")
    check_tied(fields)
    values = {ours: fields[theirs] for ours, theirs in FIELDS.items()}
    return values | {"activation": activation_from_json(fields, "hidden_act")}


def activation_from_json(fields: dict[str, Any], key: str) -> Activation:
    """Raises ModelError for an activation that we do not have."""
    if fields[key] not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {key} is {fields[key]!r}, which is not supported",
            remedy=f"use a model with one of {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[fields[key]]


def activation_to_json(activation: Activation) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def check_tied(fields: dict[str, Any]) -> None:
    """Raises ModelError for a decoder with weights of its own."""
    if not fields["tie_word_embeddings"]:
        raise ModelError(
            "config.json: tie_word_embeddings is false",
            remedy="only models whose decoder is tied to the word embeddings can be loaded",
        )
