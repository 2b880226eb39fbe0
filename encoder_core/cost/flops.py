"""The matrix products of a model and its loss for one microbatch, family by family.

Rows are taken as full. The counts equal those of torch.utils.flop_counter.FlopCounterMode, forward and backward (a test
holds every family to it). Attention is counted by its formula, scores and weighted values. A fused kernel computes the
same; that it recomputes scores in the backward pass is left out, as is usual for utilisation. DeBERTa and XLNet are
counted with the padded kernels that GPUs run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import assert_never

from encoder_core.cost.products import (
    DisentangledSize,
    Product,
    Shape,
    TwoStreamSize,
    disentangled_layer,
    plain_layer,
    pre_norm_layer,
    relative_key_scores,
    shared_keys,
    stream,
    times,
    without_gradient,
)
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import DetectorConfig, ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.heads.prediction import PASSES, POSITION_WIDTH
from encoder_core.layers.deberta_attention import log_buckets
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig

Deberta = DebertaConfig | DebertaV2Config
Plain = BertConfig | RobertaConfig | AlbertConfig | ElectraConfig | XlmConfig


@dataclass(frozen=True)
class Distilled:
    """What a student's teachers are, and whether it learns from them at every token or at targets alone. `layers`:
    whether all its states learn those of the first teacher, and `projection` to which width they are brought for it."""

    teachers: tuple[ModelConfig, ...]
    everywhere: bool
    layers: bool = False
    projection: int | None = None


@dataclass(frozen=True)
class ObjectiveTerms:
    """The terms of the loss that add computation. If none is given, the family decides: masked tokens, or XLNet's
    permuted prediction.

    Attributes:
        pairs: whether two segments belong together, or are in order (NSP, SOP).
        span_boundary: masked spans from their boundaries (SpanBERT).
        replaced: which tokens a generator replaced (ELECTRA, DeBERTa v3).
        contrastive: which texts belong together.
        beside: there are other terms beside that one, and its texts are their rows, each twice.
        distilled: what teachers hold likely. The direction of their states costs no product.
    """

    pairs: bool = False
    span_boundary: bool = False
    replaced: ReplacedTokenConfig | None = None
    contrastive: ContrastiveConfig | None = None
    beside: bool = False
    distilled: Distilled | None = None


def products(
    model: ModelConfig, terms: ObjectiveTerms, shape: Shape, *, backwards: bool = False
) -> list[Product]:
    """Everything that one microbatch multiplies, in all networks and heads; products of one name and size as one.

    `backwards`: some rows are read from their ends (XLNet).
    """
    counts: dict[Product, int] = {}
    for product in _all_networks(model, terms, shape, backwards):
        key = replace(product, count=1)
        counts[key] = counts.get(key, 0) + product.count
    return [replace(product, count=count) for product, count in counts.items() if count]


def _all_networks(
    model: ModelConfig, terms: ObjectiveTerms, shape: Shape, backwards: bool
) -> Iterator[Product]:
    if terms.contrastive is None:
        return _predicting(model, terms, shape, backwards)
    if terms.beside:
        vectors = _vectors(model, terms.contrastive, shape.twice)
        return chain(vectors, _predicting(model, terms, shape, backwards))
    return _vectors(model, terms.contrastive, shape)


def _predicting(
    model: ModelConfig, terms: ObjectiveTerms, shape: Shape, backwards: bool
) -> Iterator[Product]:
    """Every term but the contrastive one."""
    if isinstance(model, XlnetConfig):
        return chain(_xlnet(model, shape, backwards), _decoder(model.hidden, model.vocabulary, shape.targets))
    if terms.replaced is not None and isinstance(model, DetectorConfig):
        return chain(_multitask(model.generator, terms, shape), _discriminator(model, shape))
    return _multitask(model, terms, shape)


def first_pass(model: ModelConfig, terms: ObjectiveTerms, shape: Shape) -> int:
    """FLOPs of the pass that makes texts' vectors before their gradients are known; 0 where none are compared."""
    if terms.contrastive is None:
        return 0
    texts = shape.twice if terms.beside else shape
    return sum(product.forward for product in _vectors(model, terms.contrastive, texts))


def _multitask(model: ModelConfig, terms: ObjectiveTerms, shape: Shape) -> Iterator[Product]:
    """The terms that share one encoder (encoder_core/objectives/multitask.py)."""
    whole = reads_whole(model, terms)
    yield from _masked_language_model(model, shape, whole=whole)
    if terms.pairs:
        yield from _pair(model, shape, whole=whole)
    if terms.span_boundary:
        yield from _span_boundary(model, shape)
    if terms.distilled is not None:
        yield from _distillation(model, terms.distilled, shape)


def reads_whole(model: ModelConfig, terms: ObjectiveTerms) -> bool:
    """Whether DeBERTa's last layer runs for all tokens: for span boundaries and students, or if two terms read its
    output."""
    needed = terms.span_boundary or terms.distilled is not None
    return needed or (terms.pairs and not is_enhanced(model))


def is_enhanced(model: ModelConfig) -> bool:
    """Whether masked tokens are predicted by DeBERTa's mask decoder."""
    return isinstance(model, Deberta) and model.mask_decoder == "enhanced"


def _distillation(model: ModelConfig, distilled: Distilled, shape: Shape) -> Iterator[Product]:
    """The student's head once more, at the places where it learns, and the teachers, of which nothing goes back
    (encoder_core/objectives/distil.py)."""
    places = at_places(distilled, shape)
    yield from _look_at_places(model, places)
    yield from _head(model, places)
    if distilled.projection is not None:
        once = Product("head: hidden states projected", shape.tokens, model.hidden, distilled.projection)
        yield from times(iter([once]), model.layers + 1)
    for teacher in distilled.teachers:
        known = teacher.model_copy(update={"vocab": model.vocabulary})
        its = chain(_encoder(known, shape), _look_at_places(known, places), _head(known, places))
        for product in without_gradient(its):
            yield replace(product, layer=False)  # nor is it computed again


def at_places(distilled: Distilled, shape: Shape) -> Shape:
    """The microbatch, with the places where a student learns for targets."""
    return replace(shape, targets_per_row=shape.length) if distilled.everywhere else shape


def _look_at_places(model: ModelConfig, places: Shape) -> Iterator[Product]:
    """DeBERTa's mask decoder."""
    if isinstance(model, Deberta) and is_enhanced(model):
        yield from times(_look_again(model, places, places.targets_per_row), PASSES)


def _vectors(model: ModelConfig, objective: ContrastiveConfig, shape: Shape) -> Iterator[Product]:
    """Texts' vectors. Their similarities are left out: a thousandth of it, even in batches of tens of thousands."""
    yield from _encoder(model, shape)
    if objective.projection:
        yield Product("projection", shape.rows, model.hidden, model.hidden)


def _masked_language_model(model: ModelConfig, shape: Shape, *, whole: bool = False) -> Iterator[Product]:
    """Encoder and head (encoder_core/objectives/mlm.py). Of DeBERTa the last layer runs for targets only, unless the
    `whole` of it is needed by another term; the mask decoder runs it for targets anyway."""
    if whole or not isinstance(model, Deberta):
        yield from _encoder(model, shape)
    else:
        yield from _before_last(model, shape)
    if isinstance(model, Deberta) and (is_enhanced(model) or not whole):
        yield from times(_look_again(model, shape, shape.targets_per_row), passes(model))
    yield from _head(model, shape)


def _head(model: ModelConfig, shape: Shape) -> Iterator[Product]:
    width = model.embedding_width
    if not model.bare_head:
        yield Product("head: dense", shape.targets, model.hidden, width)
    yield from _decoder(width, model.vocabulary, shape.targets)


def _decoder(width: int, vocabulary: int, targets: int) -> Iterator[Product]:
    yield Product("head: scores of all ids", targets, width, vocabulary)


def _discriminator(model: DetectorConfig, shape: Shape) -> Iterator[Product]:
    yield from _encoder(model, shape)
    yield Product("head: replaced or not", shape.tokens, model.hidden, model.hidden)
    yield Product("head: replaced or not", shape.tokens, model.hidden, 1)


def _pair(model: ModelConfig, shape: Shape, *, whole: bool) -> Iterator[Product]:
    """The pooler and two classes; of DeBERTa the last layer runs for the first tokens of the rows, if not for all."""
    if isinstance(model, Deberta) and not whole:
        yield from _look_again(model, shape, 1)
    yield Product("head: pairs", shape.rows, model.hidden, model.hidden)
    yield Product("head: pairs", shape.rows, model.hidden, 2)


def _span_boundary(model: ModelConfig, shape: Shape) -> Iterator[Product]:
    """Every target taken to have a boundary; those of spans at the ends of a row have none, and from the sixteenth of a
    span on (encoder_core/objectives/span_boundary.py)."""
    hidden, width = model.hidden, model.embedding_width
    yield Product("head: span boundary", shape.targets, 2 * hidden + POSITION_WIDTH, hidden)
    yield Product("head: span boundary", shape.targets, hidden, width)
    yield from _decoder(width, model.vocabulary, shape.targets)


def _encoder(model: ModelConfig, shape: Shape) -> Iterator[Product]:
    """All layers, for all tokens."""
    match model:
        case DebertaConfig() | DebertaV2Config():
            yield from _before_last(model, shape)
            yield from disentangled_layer(disentangled_size(model, shape.length), shape.rows, shape.length)
            if model.layers == 1:
                yield from _convolution(model, shape)
        case XlnetConfig():
            yield from _content(model, shape)
        case BertConfig() | RobertaConfig() | AlbertConfig() | ElectraConfig() | XlmConfig():
            yield from _plain(model, shape)
        case PreNormConfig():
            size = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
            shared = model.hidden // model.heads * model.shared_heads
            for layer in range(model.layers):
                yield from pre_norm_layer(*size, shared=shared, window=model.window(layer))
        case _ as never:
            assert_never(never)


def _plain(model: Plain, shape: Shape) -> Iterator[Product]:
    if model.projects_embeddings:
        yield Product("embeddings to hidden", shape.tokens, model.embedding_width, model.hidden)
    size = (shape.rows, shape.length, model.heads, model.hidden)
    yield from times(plain_layer(*size, model.feed_forward), model.layers)
    if isinstance(model, BertConfig) and model.position != "absolute":
        sides = 2 if model.position == "relative_key_query" else 1
        yield from times(relative_key_scores(*size, sides), model.layers)


def passes(model: Deberta) -> int:
    """How often the last layer runs for the targets."""
    return PASSES if model.mask_decoder == "enhanced" else 1


def disentangled_size(model: Deberta, length: int) -> DisentangledSize:
    return DisentangledSize(
        model.hidden, model.heads, model.feed_forward, places(model, length), isinstance(model, DebertaConfig)
    )


def places(model: Deberta, length: int) -> int:
    """Rows of the position table that rows of `length` tokens reach (encoder_core/layers/deberta_attention.py)."""
    if isinstance(model, DebertaConfig):
        span, reach = model.max_length, length - 1
    else:
        span, reach = model.buckets, log_buckets(model.buckets, model.max_length)[length - 1]
    return min(2 * span, span + reach + 1) - max(0, span - reach)


def _before_last(model: Deberta, shape: Shape) -> Iterator[Product]:
    size = disentangled_size(model, shape.length)
    yield from times(disentangled_layer(size, shape.rows, shape.length), model.layers - 1)
    if model.layers > 1:
        yield from _convolution(model, shape)


def _convolution(model: Deberta, shape: Shape) -> Iterator[Product]:
    if isinstance(model, DebertaV2Config) and model.convolution is not None:
        yield Product("convolution", shape.tokens, model.convolution * model.hidden, model.hidden)


def _look_again(model: Deberta, shape: Shape, queries: int) -> Iterator[Product]:
    """The last layer for `queries` tokens of each row."""
    return disentangled_layer(
        disentangled_size(model, shape.length), shape.rows, shape.length, queries=queries
    )


def distances(model: XlnetConfig, length: int, backwards: bool) -> int:
    """Distances that occur, from key to query (encoder_core/layers/xlnet_encoder.py)."""
    ahead, behind = length - 1, length - 1 + model.memory
    return (behind if backwards else ahead) + behind + 1


def two_stream_size(model: XlnetConfig, length: int, backwards: bool) -> TwoStreamSize:
    """With the whole memory behind the rows."""
    places = distances(model, length, backwards)
    return TwoStreamSize(model.hidden, model.heads, model.feed_forward, model.memory, places)


def _content(model: XlnetConfig, shape: Shape) -> Iterator[Product]:
    """The content stream alone, without memory."""
    row = (two_stream_size(forgetful(model), shape.length, False), shape.rows, shape.length)
    yield from times(shared_keys(*row), model.layers)
    yield from times(stream(*row, queries=shape.length), model.layers)


def forgetful(model: XlnetConfig) -> XlnetConfig:
    """Where nothing is predicted, rows stand alone."""
    return model.model_copy(update={"memory": 0})


def _xlnet(model: XlnetConfig, shape: Shape, backwards: bool) -> Iterator[Product]:
    """Both streams, with the whole memory behind them; only the queries of the last layer reach the loss."""
    size = two_stream_size(model, shape.length, backwards)
    row = (size, shape.rows, shape.length)
    yield from times(shared_keys(*row), model.layers)
    yield from times(stream(*row, queries=shape.length), model.layers - 1)
    yield from without_gradient(stream(*row, queries=shape.length))
    yield from times(stream(*row, queries=shape.targets_per_row), model.layers)
