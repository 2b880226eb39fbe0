"""How many parameters a network has, counted from its configuration: who lists or checks recipes need not build it.

A test compares every family and term with what torch builds (`objectives/compose.py`).
"""

from collections.abc import Mapping, Sequence

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import FIRST_POSITION, BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import DetectorConfig, ModelConfig, is_enhanced
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.sizes import feed_forward_weights, layer_weights, linear_weights, norm_weights
from encoder_core.terms.composition import Parts
from encoder_core.terms.contrastive import ContrastiveConfig
from encoder_core.terms.replaced import ReplacedTokenConfig
from encoder_core.terms.term import HeadConfig, TermConfig


def weight_count(model: ModelConfig, terms: Mapping[str, TermConfig]) -> int:
    """Return the number of parameters that `compose` builds for these terms. Tied parameters count once.

    Raises:
        ModelError: the size of the vocabulary is unknown.
    """
    parts = Parts.of(terms)
    vectors = parts.around or parts.whole
    projection = isinstance(vectors, ContrastiveConfig) and vectors.projection
    count = linear_weights(model.hidden, model.hidden) if projection else 0
    if isinstance(parts.whole, ReplacedTokenConfig):
        assert isinstance(model, DetectorConfig)  # else it is refused
        shared = 0 if parts.whole.embeddings == "gradient_disentangled" else _embeddings(model)
        return count + _network(model.generator, parts.heads) + detector_weights(model) - shared
    if parts.whole is None:
        return count + _network(model, parts.heads)
    if isinstance(model, BartConfig):
        count += _decoder(model)
    elif isinstance(model, XlnetConfig) and "plm" in terms:
        count += model.vocabulary  # the decoder's bias
    return count + _encoder(model)


def masked_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a network with masked tokens alone."""
    return _network(model, ()) + _head(model)


def detector_weights(model: ModelConfig) -> int:
    """Return the number of parameters of a discriminator alone, with embeddings of its own."""
    context = isinstance(model, DebertaConfig | DebertaV2Config) and norm_weights(model.hidden)
    return (
        _encoder(model)
        + context
        + linear_weights(model.hidden, model.hidden)
        + linear_weights(model.hidden, 1)
    )


def _network(model: ModelConfig, terms: Sequence[HeadConfig]) -> int:
    head = _head(model) if any(term.predicts_ids for term in terms) else 0
    positions = model.max_length * model.hidden if is_enhanced(model) else 0
    return _encoder(model) + positions + head + sum(term.weights(model) for term in terms)


def _head(model: ModelConfig) -> int:
    hidden, width = model.hidden, model.embedding_width
    dense = (
        0
        if model.bare_head
        else linear_weights(hidden, width, model.biases) + norm_weights(width, model.biases)
    )
    return dense + model.vocabulary * (model.decoder_bias + (0 if model.tied else width))


def _encoder(model: ModelConfig) -> int:
    hidden, inner, whole = model.hidden, model.feed_forward, _embeddings(model)
    match model:
        case PreNormConfig():
            attention = 2 * hidden * (hidden + hidden // model.heads * model.shared_heads)
            norms = sum(1 + model.normed(layer) for layer in range(model.layers)) + 1
            return whole + model.layers * (attention + 3 * hidden * inner) + norms * hidden
        case XlnetConfig():
            attention = 5 * hidden * hidden + 5 * hidden + norm_weights(hidden)
            return whole + hidden + model.layers * (attention + feed_forward_weights(hidden, inner))
        case DebertaConfig():
            positions = hidden * hidden + linear_weights(hidden, hidden)
            layer = layer_weights(hidden, inner) - hidden + positions  # keys have no bias
            return whole + 2 * model.max_length * hidden + model.layers * layer
        case DebertaV2Config():
            if model.convolution is not None:
                whole += linear_weights(model.convolution * hidden, hidden) + norm_weights(hidden)
            table = 2 * model.buckets * hidden + norm_weights(hidden)
            return whole + table + model.layers * layer_weights(hidden, inner)
        case BertConfig() if model.position != "absolute":
            whole += model.layers * (2 * model.max_length - 1) * (hidden // model.heads)
    whole += linear_weights(model.embedding_width, hidden) if model.projects_embeddings else 0
    return whole + model.distinct_layers * layer_weights(hidden, inner)


def _decoder(model: BartConfig) -> int:
    across = 4 * linear_weights(model.hidden, model.hidden) + norm_weights(model.hidden)
    words = model.vocabulary * model.hidden
    return (
        _embeddings(model) - words + model.layers * (layer_weights(model.hidden, model.feed_forward) + across)
    )


def _embeddings(model: ModelConfig) -> int:
    """Return the number of parameters of all tables at the input and their norm."""
    rows, normed = model.vocabulary, True
    match model:
        case BertConfig():
            rows += model.token_types + (model.max_length if model.position == "absolute" else 0)
        case AlbertConfig() | ElectraConfig():
            rows += model.token_types + model.max_length
        case RobertaConfig():
            rows += model.max_length + model.first_position
        case XlmConfig():
            rows += model.max_length + model.language_table
        case BartConfig():
            rows += model.max_length + FIRST_POSITION
        case XlnetConfig():
            normed = False
        case PreNormConfig():
            normed = model.embedding_norm
    width = model.embedding_width
    return rows * width + normed * norm_weights(width, model.biases)
