"""How many parameters a network has, counted from its configuration: who lists or checks recipes need not build it.

A test compares every family and term with what torch builds (`objectives/compose.py`).
"""

from collections.abc import Mapping, Sequence

from encoder_core.families.catalogue import DetectorConfig, ModelConfig, uses_mask_decoder
from encoder_core.layers.sizes import linear_weights, norm_weights
from encoder_core.terms.composition import ObjectiveParts
from encoder_core.terms.contrastive import ContrastiveConfig
from encoder_core.terms.replaced import ReplacedTokenConfig
from encoder_core.terms.term import HeadConfig, TermConfig


def weight_count(model: ModelConfig, terms: Mapping[str, TermConfig]) -> int:
    """Return the number of parameters that `compose` builds for these terms. Tied parameters count once.

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    parts = ObjectiveParts.from_terms(terms)
    vectors = parts.around or parts.whole
    projection = isinstance(vectors, ContrastiveConfig) and vectors.projection
    count = linear_weights(model.hidden, model.hidden) if projection else 0
    if isinstance(parts.whole, ReplacedTokenConfig):
        assert isinstance(model, DetectorConfig)  # the recipe's checks refuse other models
        shared = 0 if parts.whole.embeddings == "gradient_disentangled" else model.embedding_weights()
        return count + _network(model.generator, parts.heads) + detector_weights(model) - shared
    if parts.whole is None:
        return count + _network(model, parts.heads)
    if model.permutes and "plm" in terms:
        count += model.vocabulary  # the bias of the head
    return count + model.encoder_weights() + model.decoder_weights()


def masked_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a network with masked tokens alone."""
    return _network(model, ()) + _head(model)


def detector_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a discriminator alone, with embeddings of its own."""
    context = model.context_norm * norm_weights(model.hidden)
    head = linear_weights(model.hidden, model.hidden) + linear_weights(model.hidden, 1)
    return model.encoder_weights() + context + head


def _network(model: ModelConfig, terms: Sequence[HeadConfig]) -> int:
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
