"""`DistilBertForMaskedLM` of transformers: BERT without token types and pooler (Sanh et al. 2019, section 3)."""

from typing import Any

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.hf.keys import KeyTable, Pair
from encoder_core.families.hf.parts import (
    activation_from_json,
    activation_to_json,
    check_tied,
    embedding_pairs,
    with_bias,
)

_OURS, _THEIRS = "encoder.layers.{layer}", "distilbert.transformer.layer.{layer}"

TABLE = KeyTable(
    pairs=(
        *embedding_pairs("encoder.embeddings", "distilbert.embeddings"),
        *with_bias(f"{_OURS}.attention.query", f"{_THEIRS}.attention.q_lin"),
        *with_bias(f"{_OURS}.attention.key", f"{_THEIRS}.attention.k_lin"),
        *with_bias(f"{_OURS}.attention.value", f"{_THEIRS}.attention.v_lin"),
        *with_bias(f"{_OURS}.attention.output", f"{_THEIRS}.attention.out_lin"),
        *with_bias(f"{_OURS}.attention_norm", f"{_THEIRS}.sa_layer_norm"),
        *with_bias(f"{_OURS}.feed_forward.up", f"{_THEIRS}.ffn.lin1"),
        *with_bias(f"{_OURS}.feed_forward.down", f"{_THEIRS}.ffn.lin2"),
        *with_bias(f"{_OURS}.feed_forward_norm", f"{_THEIRS}.output_layer_norm"),
        *with_bias("head.dense", "vocab_transform"),
        *with_bias("head.norm", "vocab_layer_norm"),
        Pair("head.decoder.bias", "vocab_projector.bias"),
    ),
    tied=("vocab_projector.weight",),
    unused=("distilbert.embeddings.position_ids",),
)

FIELDS = {
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

DEFAULTS: dict[str, Any] = {
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

EPSILON = 1e-12  # of every LayerNorm; their configuration has no field for it


def to_json(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that describe the model. Raises ModelError for what the class cannot be."""
    if config.position != "absolute" or config.layer_norm_eps != EPSILON:
        raise ModelError(
            f"model.position is {config.position} and model.layer_norm_eps {config.layer_norm_eps:g}: BERT without "
            "token types is transformers' DistilBERT, which has absolute positions and an epsilon of 1e-12",
            remedy="export is possible with those values, or with model.token_types of 1 or more",
        )
    return {
        "model_type": "distilbert",
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "activation": activation_to_json(config.activation),
        "sinusoidal_pos_embds": False,
        "tie_word_embeddings": True,
    }


def from_json(fields: dict[str, Any]) -> BertConfig:
    """The inverse. Positions that were made of sines lie in the weights like any others. Raises ModelError for a model
    that we cannot load."""
    fields = DEFAULTS | fields
    check_tied(fields)
    values = {ours: fields[theirs] for ours, theirs in FIELDS.items()}
    return BertConfig(
        **values,
        activation=activation_from_json(fields, "activation"),
        layer_norm_eps=EPSILON,
        token_types=0,
    )
