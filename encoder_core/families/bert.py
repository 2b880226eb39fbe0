"""BERT (Devlin et al., 2018). SpanBERT (Joshi et al., 2020) has the same encoder, and differs in its objective.
DistilBERT (Sanh et al., 2019) is half as deep, and has no token types."""

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from encoder_core.families.config import WithGenerator, encoder_layers
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.encoder import Embeddings, Encoder
from encoder_core.layers.relative_key import RelativeKeyAttention


class BertConfig(WithGenerator):
    """See `EncoderConfig` and `WithGenerator`.

    Attributes:
        token_types: segments told apart by an embedding; 0 for none (DistilBERT).
        position: absolute embeddings at the input (the paper), or learned relative positions in every layer's
            scores, against the queries (relative_key) or against queries and keys (relative_key_query).
    """

    family: Literal["bert"] = "bert"
    token_types: int = Field(default=2, ge=0)
    position: Literal["absolute", "relative_key", "relative_key_query"] = "absolute"


def _size(layers: int, hidden: int, vocab: int = 30_522) -> BertConfig:
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 64, feed_forward=4 * hidden, vocab=vocab)


TINY = _size(2, 128)
MINI = _size(4, 256)
SMALL = _size(4, 512)
MEDIUM = _size(8, 512)
BASE = _size(12, 768)
LARGE = _size(24, 1024)

DISTILBERT_BASE = _size(6, 768).model_copy(update={"token_types": 0, "initializer": "normal"})
SPANBERT_BASE = _size(12, 768, vocab=28_996).model_copy(update={"initializer": "normal"})
SPANBERT_LARGE = _size(24, 1024, vocab=28_996).model_copy(update={"initializer": "normal"})


def build(
    config: BertConfig,
    *,
    embeddings: Embeddings | None = None,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> Encoder:
    """The encoder, on `embeddings` shared with another if given; its weights not yet initialised. `attend` is the
    kernel of absolute positions.

    Raises ModelError if the vocabulary is unknown.
    """
    layers = encoder_layers(config, config.layers, _kernels(config, attend))
    return Encoder(embeddings or _embeddings(config), layers, checkpoint_activations=checkpoint_activations)


def _embeddings(config: BertConfig) -> Embeddings:
    return Embeddings(
        config.vocabulary,
        config.hidden,
        positions=config.max_length if config.position == "absolute" else 0,
        token_types=config.token_types,
        eps=config.layer_norm_eps,
        dropout=config.dropout,
    )


def _kernels(config: BertConfig, attend: Attend) -> Callable[[], Attend]:
    """The kernel of one more layer: relative positions are parameters, so each layer has its own."""
    if config.position == "absolute":
        return lambda: attend
    both_sides = config.position == "relative_key_query"
    width = config.hidden // config.heads
    return lambda: RelativeKeyAttention(config.max_length, width, both_sides=both_sides)
