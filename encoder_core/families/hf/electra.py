"""`ElectraForPreTraining` (the discriminator) and `ElectraForMaskedLM` (the generator) of transformers."""

from dataclasses import replace
from typing import Any

from encoder_core.families.electra import ElectraConfig
from encoder_core.families.hf.keys import KeyTable, Pair
from encoder_core.families.hf.parts import (
    embedding_pairs,
    layer_pairs,
    shared_from_json,
    shared_to_json,
    with_bias,
)

_ENCODER = (
    *embedding_pairs("encoder.embeddings", "electra.embeddings"),
    Pair("encoder.embeddings.token_type.weight", "electra.embeddings.token_type_embeddings.weight"),
    *layer_pairs("encoder.layers.{layer}", "electra.encoder.layer.{layer}"),
)

_PROJECTION = with_bias("encoder.projection", "electra.embeddings_project")

_GENERATOR = (
    *with_bias("head.dense", "generator_predictions.dense"),
    *with_bias("head.norm", "generator_predictions.LayerNorm"),
    Pair("head.decoder.bias", "generator_lm_head.bias"),
)

_DISCRIMINATOR = (
    *with_bias("head.dense", "discriminator_predictions.dense"),
    *with_bias("head.score", "discriminator_predictions.dense_prediction"),
)

_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30_522,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
"""What transformers assumes where a config.json is silent, beyond `parts.DEFAULTS`."""


def masked_lm(config: ElectraConfig) -> KeyTable:
    """The generator's parameters, for the generator's own configuration."""
    return KeyTable(
        (*_shared(config), *_GENERATOR),
        tied=("generator_lm_head.weight",),
        unused=(*_BUFFERS, *(pair.theirs for pair in _DISCRIMINATOR)),
    )


def detection(config: ElectraConfig) -> KeyTable:
    """The discriminator's parameters."""
    unused = (*_BUFFERS, *(pair.theirs for pair in _GENERATOR), "generator_lm_head.weight")
    return KeyTable((*_shared(config), *_DISCRIMINATOR), unused=unused)


def with_detection(encoder: KeyTable) -> KeyTable:
    """The parameters of another family's encoder, and a detection head under ELECTRA's names, which the family's class
    of transformers passes over."""
    return replace(encoder, pairs=(*encoder.pairs, *_DISCRIMINATOR))


def _shared(config: ElectraConfig) -> tuple[Pair, ...]:
    return _ENCODER if config.embedding == config.hidden else (*_ENCODER, *_PROJECTION)


def to_json(config: ElectraConfig) -> dict[str, Any]:
    """The fields of config.json that describe one network; `generator_divisor` has no place there."""
    return {
        "model_type": "electra",
        **shared_to_json(config),
        "embedding_size": config.embedding,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
    }


def from_json(fields: dict[str, Any]) -> ElectraConfig:
    """The inverse, the generator as wide as this network. Raises ModelError for what we cannot load."""
    fields = DEFAULTS | fields
    return ElectraConfig(
        **shared_from_json(fields),
        embedding=fields["embedding_size"],
        max_length=fields["max_position_embeddings"],
        token_types=fields["type_vocab_size"],
        generator_divisor=1,
    )
