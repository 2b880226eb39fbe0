"""Parameter counts from a network's configuration, so that recipes can be listed and checked without building it.

A test compares every family and term with what torch builds (`objectives/compose.py`).
"""

from collections.abc import Sequence

from encoder_core.families.catalogue import ModelConfig, uses_mask_decoder
from encoder_core.layers.sizes import linear_weight_count, norm_weight_count
from encoder_core.objectives.term import HeadConfig


def masked_lm_weight_count(model: ModelConfig) -> int:
    """Return the number of parameters of an encoder with a masked-language-model head."""
    return network_weight_count(model, ()) + _head_weight_count(model)


def detector_weight_count(model: ModelConfig) -> int:
    """Return the number of parameters of a discriminator, including its embeddings."""
    context = model.context_norm * norm_weight_count(model.hidden)
    head = linear_weight_count(model.hidden, model.hidden) + linear_weight_count(model.hidden, 1)
    return model.encoder_weight_count() + context + head


def network_weight_count(model: ModelConfig, terms: Sequence[HeadConfig]) -> int:
    """Return the number of parameters of an encoder with the heads of these terms."""
    head = _head_weight_count(model) if any(term.predicts_ids for term in terms) else 0
    positions = model.max_length * model.hidden if uses_mask_decoder(model) else 0
    return model.encoder_weight_count() + positions + head + sum(term.weight_count(model) for term in terms)


def _head_weight_count(model: ModelConfig) -> int:
    hidden, width = model.hidden, model.embedding_width
    if model.has_bare_decoder_head:
        dense = 0
    elif (inner := model.head_inner_width) is not None:
        dense = linear_weight_count(hidden, inner, model.biases) + linear_weight_count(inner, width, model.biases)
    else:
        dense = linear_weight_count(hidden, width, model.biases) + norm_weight_count(width, model.biases)
    return dense + model.vocabulary_size * (model.has_decoder_bias + (0 if model.has_tied_decoder else width))
