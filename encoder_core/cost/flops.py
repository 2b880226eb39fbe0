"""The matrix products of a network for one microbatch, family by family; terms add theirs (encoder_core/objectives).

Rows are assumed to be full. The counts equal those of torch.utils.flop_counter.FlopCounterMode, forward and backward
(a test checks every family). Attention is counted by its formula, scores and weighted values. A fused kernel computes
the same; its recomputation of scores in the backward pass is left out, as is usual for utilisation. DeBERTa and XLNet
are counted with the padded kernels that GPUs run. In causal rows attention counts for the pairs in sight, L (L + 1) / 2
of L squared in a row, as flash attention and our kernels compute them; products with relative positions count whole.
"""

from collections.abc import Iterator
from typing import assert_never

from encoder_core.cost.products import (
    DisentangledSize,
    Product,
    Shape,
    TwoStreamSize,
    disentangled_layer,
    layer_across,
    plain_layer,
    pre_norm_layer,
    relative_key_scores,
    shared_keys,
    stream,
    times,
    without_gradient,
)
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import Deberta, DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.sizes import PASSES, log_buckets

Plain = BertConfig | RobertaConfig | AlbertConfig | ElectraConfig | XlmConfig | BartConfig


def is_enhanced(model: ModelConfig) -> bool:
    """Return whether DeBERTa's mask decoder predicts masked tokens."""
    return isinstance(model, Deberta) and model.mask_decoder == "enhanced"


def head(model: ModelConfig, targets: int) -> Iterator[Product]:
    """Yield the products of the masked-language-model head on `targets` states."""
    width = model.embedding_width
    if not model.bare_head:
        yield Product("head: dense", targets, model.hidden, width)
    yield from decoder(width, model.vocabulary, targets)


def decoder(width: int, vocabulary: int, targets: int) -> Iterator[Product]:
    yield Product("head: scores of all ids", targets, width, vocabulary)


def encoder(model: ModelConfig, shape: Shape) -> Iterator[Product]:
    """Yield the products of all layers, for all tokens."""
    match model:
        case DebertaConfig() | DebertaV2Config():
            yield from before_last(model, shape)
            size = disentangled_size(model, shape.length)
            yield from disentangled_layer(size, shape.rows, shape.length, causal=shape.causal)
            if model.layers == 1:
                yield from _convolution(model, shape)
        case XlnetConfig():
            yield from _content(model, shape)
        case BertConfig() | RobertaConfig() | AlbertConfig() | ElectraConfig() | XlmConfig() | BartConfig():
            yield from _plain(model, shape)
        case PreNormConfig():
            yield from _pre_norm(model, shape)
        case _ as never:
            assert_never(never)


def _pre_norm(model: PreNormConfig, shape: Shape) -> Iterator[Product]:
    size = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
    shared = model.hidden // model.heads * model.shared_heads
    for layer in range(model.layers):
        yield from pre_norm_layer(*size, shared=shared, window=model.window(layer), causal=shape.causal)


def _plain(model: Plain, shape: Shape) -> Iterator[Product]:
    if model.projects_embeddings:
        yield Product("embeddings to hidden", shape.tokens, model.embedding_width, model.hidden)
    size = (shape.rows, shape.length, model.heads, model.hidden)
    yield from times(plain_layer(*size, model.feed_forward, causal=shape.causal), model.layers)
    if isinstance(model, BertConfig) and model.position != "absolute":
        sides = 2 if model.position == "relative_key_query" else 1
        yield from times(relative_key_scores(*size, sides), model.layers)


def writing(model: BartConfig, shape: Shape, read: int) -> Iterator[Product]:
    """Yield the products of the decoder's layers, for all tokens. `read`: number of tokens that the encoder reads of
    each row.
    """
    size = (shape.rows, shape.length, read, model.heads, model.hidden, model.feed_forward)
    yield from times(layer_across(*size), model.layers)


def passes(model: Deberta) -> int:
    """Return how many times the last layer runs for the targets."""
    return PASSES if model.mask_decoder == "enhanced" else 1


def disentangled_size(model: Deberta, length: int) -> DisentangledSize:
    return DisentangledSize(
        model.hidden, model.heads, model.feed_forward, places(model, length), isinstance(model, DebertaConfig)
    )


def places(model: Deberta, length: int) -> int:
    """Return how many rows of the position table rows of `length` tokens use
    (encoder_core/layers/deberta_attention.py).
    """
    if isinstance(model, DebertaConfig):
        span, reach = model.max_length, length - 1
    else:
        span, reach = model.buckets, log_buckets(model.buckets, model.max_length)[length - 1]
    return min(2 * span, span + reach + 1) - max(0, span - reach)


def before_last(model: Deberta, shape: Shape) -> Iterator[Product]:
    size = disentangled_size(model, shape.length)
    layer = disentangled_layer(size, shape.rows, shape.length, causal=shape.causal)
    yield from times(layer, model.layers - 1)
    if model.layers > 1:
        yield from _convolution(model, shape)


def _convolution(model: Deberta, shape: Shape) -> Iterator[Product]:
    if isinstance(model, DebertaV2Config) and model.convolution is not None:
        yield Product("convolution", shape.tokens, model.convolution * model.hidden, model.hidden)


def look_again(model: Deberta, shape: Shape, queries: int) -> Iterator[Product]:
    """Yield the products of the last layer for `queries` tokens of each row."""
    return disentangled_layer(
        disentangled_size(model, shape.length), shape.rows, shape.length, queries=queries
    )


def distances(model: XlnetConfig, length: int, backwards: bool) -> int:
    """Return the number of distances from key to query (encoder_core/layers/xlnet_encoder.py)."""
    ahead, behind = length - 1, length - 1 + model.memory
    return (behind if backwards else ahead) + behind + 1


def two_stream_size(model: XlnetConfig, length: int, backwards: bool) -> TwoStreamSize:
    """Return the size of a layer with full memory."""
    places = distances(model, length, backwards)
    return TwoStreamSize(model.hidden, model.heads, model.feed_forward, model.memory, places)


def _content(model: XlnetConfig, shape: Shape) -> Iterator[Product]:
    """Yield the products of the content stream alone, without memory."""
    row = (two_stream_size(forgetful(model), shape.length, False), shape.rows, shape.length)
    yield from times(shared_keys(*row), model.layers)
    yield from times(stream(*row, queries=shape.length), model.layers)


def forgetful(model: XlnetConfig) -> XlnetConfig:
    """Return the model without memory: where nothing is predicted, rows stand alone."""
    return model.model_copy(update={"memory": 0})


def two_streams(model: XlnetConfig, shape: Shape) -> Iterator[Product]:
    """Yield the products of both streams with full memory. In the last layer only the query stream reaches the loss."""
    size = two_stream_size(model, shape.length, shape.backwards)
    row = (size, shape.rows, shape.length)
    yield from times(shared_keys(*row), model.layers)
    yield from times(stream(*row, queries=shape.length), model.layers - 1)
    yield from without_gradient(stream(*row, queries=shape.length))
    yield from times(stream(*row, queries=shape.targets_per_row), model.layers)
