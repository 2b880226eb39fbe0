"""How many parameters a network has, counted from its configuration: who lists or checks recipes need not build it.

A test compares every family and term with what torch builds (`objectives/compose.py`).
"""

from collections.abc import Sequence

from encoder_core.families.catalogue import ModelConfig, uses_mask_decoder
from encoder_core.layers.sizes import linear_weights, norm_weights
from encoder_core.objectives.term import HeadConfig


def masked_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a network with masked tokens alone."""
    return network_weights(model, ()) + _head(model)


def detector_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a discriminator alone, with embeddings of its own."""
    context = model.context_norm * norm_weights(model.hidden)
    head = linear_weights(model.hidden, model.hidden) + linear_weights(model.hidden, 1)
    return model.encoder_weights() + context + head


def network_weights(model: ModelConfig, terms: Sequence[HeadConfig]) -> int:
    """Return the number of parameters of a network with the heads of these terms."""
    head = _head(model) if any(term.predicts_ids for term in terms) else 0
    positions = model.max_length * model.hidden if uses_mask_decoder(model) else 0
    return model.encoder_weights() + positions + head + sum(term.weights(model) for term in terms)


def _head(model: ModelConfig) -> int:
    hidden, width = model.hidden, model.embedding_width
    if model.decoder_only_head:
        dense = 0
    elif (inner := model.head_inner) is not None:
        dense = linear_weights(hidden, inner, model.biases) + linear_weights(inner, width, model.biases)
    else:
        dense = linear_weights(hidden, width, model.biases) + norm_weights(width, model.biases)
    return dense + model.vocabulary * (model.decoder_bias + (0 if model.tied else width))
