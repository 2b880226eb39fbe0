"""`RobertaForMaskedLM` of transformers."""

from typing import Any

from encoder_core.families.hf.keys import Fold, KeyTable, Pair
from encoder_core.families.hf.parts import (
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)
from encoder_core.families.roberta import RobertaConfig

TABLE = KeyTable(
    pairs=(
        *embedding_pairs("encoder.embeddings", "roberta.embeddings"),
        *layer_pairs("encoder.layers.{layer}", "roberta.encoder.layer.{layer}"),
        *with_bias("head.dense", "lm_head.dense"),
        *with_bias("head.norm", "lm_head.layer_norm"),
        Pair("head.decoder.bias", "lm_head.bias"),
    ),
    tied=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    unused=(
        "roberta.embeddings.position_ids",
        "roberta.embeddings.token_type_ids",
        "roberta.pooler.dense.weight",
        "roberta.pooler.dense.bias",
    ),
    folds=(Fold("roberta.embeddings.token_type_embeddings.weight", "encoder.embeddings.position.weight"),),
)


DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_265,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
}
"""What transformers assumes where a config.json is silent, beyond `parts.DEFAULTS`."""


def to_json(config: RobertaConfig) -> dict[str, Any]:
    """The fields of config.json that describe the model."""
    return {
        "model_type": "roberta",
        **shared_to_json(config),
        "max_position_embeddings": config.max_length + config.first_position,
        "type_vocab_size": 1,
    }


def from_json(fields: dict[str, Any]) -> RobertaConfig:
    """The inverse. Raises ModelError for a model that we do not have."""
    fields = DEFAULTS | fields
    values = shared_from_json(fields)
    max_length = fields["max_position_embeddings"] - fields["pad_token_id"] - 1
    return RobertaConfig(**values, max_length=max_length)
