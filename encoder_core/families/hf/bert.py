"""`BertForMaskedLM` and `BertForPreTraining` of transformers."""

from typing import Any

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.hf.keys import KeyTable, Pair
from encoder_core.families.hf.parts import (
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)

_PAIRS = (
    *embedding_pairs("encoder.embeddings", "bert.embeddings"),
    Pair("encoder.embeddings.token_type.weight", "bert.embeddings.token_type_embeddings.weight"),
    *layer_pairs("encoder.layers.{layer}", "bert.encoder.layer.{layer}"),
    *with_bias("head.dense", "cls.predictions.transform.dense"),
    *with_bias("head.norm", "cls.predictions.transform.LayerNorm"),
    Pair("head.decoder.bias", "cls.predictions.bias"),
)

_PAIR_HEAD = (
    *with_bias("pair_head.pooler", "bert.pooler.dense"),
    *with_bias("pair_head.classifier", "cls.seq_relationship"),
)

_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")

MASKED_LM = KeyTable(_PAIRS, tied=_TIED, unused=(*_BUFFERS, *(pair.theirs for pair in _PAIR_HEAD)))
PRETRAINING = KeyTable((*_PAIRS, *_PAIR_HEAD), tied=_TIED, unused=_BUFFERS)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}
"""What transformers assumes where a config.json is silent, beyond `parts.DEFAULTS`."""


def to_json(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that describe the model. Raises ModelError for relative positions."""
    if config.position != "absolute":
        raise ModelError(
            f"model.position is {config.position!r}, which transformers' BERT no longer has",
            remedy="export is possible with position: absolute only",
        )
    return {
        "model_type": "bert",
        **shared_to_json(config),
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
    }


def from_json(fields: dict[str, Any]) -> BertConfig:
    """The inverse. Raises ModelError for a model that we cannot load."""
    fields = DEFAULTS | fields
    if fields["position_embedding_type"] != "absolute":
        raise ModelError(
            f"config.json: position_embedding_type is {fields['position_embedding_type']!r}",
            remedy="only BERT models with absolute positions can be loaded",
        )
    return BertConfig(
        **shared_from_json(fields),
        max_length=fields["max_position_embeddings"],
        token_types=fields["type_vocab_size"],
    )
