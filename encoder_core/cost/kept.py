"""What embeddings and layers of each family leave in memory for the backward pass; XLNet's: `activations.py`."""

from collections.abc import Iterator
from dataclasses import replace

from encoder_core.cost.flops import Deberta, disentangled_size
from encoder_core.cost.products import Shape
from encoder_core.cost.saved import (
    FP32,
    INDEX,
    MASK,
    Drops,
    Kernel,
    Layer,
    PreNormSize,
    Saved,
    disentangled_layer,
    norm,
    plain_layer,
    pre_norm_layer,
    relative_key_layer,
    rms_norm,
    several,
)
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.build import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.pre_norm import PreNormConfig


def kept_by_embeddings(model: ModelConfig, shape: Shape, kernel: Kernel = "gpu") -> Iterator[Saved]:
    """Ids, the sum's LayerNorm, dropout, and what is projected where widths differ. Of pre-norm encoders also the
    angles of rotary positions, which all layers share, and the last norm."""
    if isinstance(model, PreNormConfig):
        yield from _around_pre_norm_layers(model, shape, kernel)
        return
    wide = model.embedding if isinstance(model, AlbertConfig | ElectraConfig) else model.hidden
    yield Saved("ids", shape.tokens, INDEX, 1 if isinstance(model, Deberta) else 3)
    yield from norm(shape.tokens, wide)
    if model.dropout:
        yield Saved("dropout masks", shape.tokens * wide, MASK)
    if isinstance(model, AlbertConfig) or wide != model.hidden:
        yield Saved("embeddings before their projection", shape.tokens * wide)


def _around_pre_norm_layers(model: PreNormConfig, shape: Shape, kernel: Kernel) -> Iterator[Saved]:
    bases = {model.rope_base(layer) for layer in range(model.layers)}
    width = model.hidden // model.heads
    yield Saved("ids", shape.tokens, INDEX)
    size = (shape.tokens, model.hidden)
    yield from several(rms_norm(*size, kernel) if model.rms_norm else norm(*size), 1 + model.embedding_norm)
    yield Saved("cosines and sines", shape.tokens * width // 2, FP32, 2 * len(bases))
    if model.dropout:
        yield Saved("dropout masks", shape.tokens * model.hidden, MASK)


def kept_by_layers(model: ModelConfig, shape: Shape, kernel: Kernel, *, but: int = 0) -> Iterator[Layer]:
    """All layers for all tokens, `but` the last so many."""
    count, drops = model.layers - but, drops_of(model)
    if isinstance(model, DebertaConfig | DebertaV2Config):
        size = disentangled_size(model, shape.length)
        yield replace(
            disentangled_layer(size, shape.rows, shape.length, kernel=kernel, drops=drops), count=count
        )
        if isinstance(model, DebertaV2Config) and model.convolution is not None:
            yield _convolution(model, shape)
        return
    if isinstance(model, PreNormConfig):
        yield from _pre_norm_layers(model, shape, kernel)
        return
    sizes = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
    if isinstance(model, BertConfig) and model.position != "absolute":
        sides = 2 if model.position == "relative_key_query" else 1
        yield replace(relative_key_layer(*sizes, sides, kernel=kernel, drops=drops), count=count)
        return
    yield replace(plain_layer(*sizes, kernel=kernel, drops=drops), count=count)


def _pre_norm_layers(model: PreNormConfig, shape: Shape, kernel: Kernel) -> Iterator[Layer]:
    size = PreNormSize(
        model.hidden,
        model.heads,
        model.feed_forward,
        shared_heads=model.shared_heads,
        rms_norm=model.rms_norm,
        drops_scores=model.attention_dropout > 0,
        drops_attention=model.attention_output_dropout > 0,
        drops_inner=model.dropout > 0,
    )
    for layer in range(model.layers):
        yield pre_norm_layer(
            size, shape.rows, shape.length, kernel, normed=model.normed(layer), window=model.window(layer)
        )


def _convolution(model: DebertaV2Config, shape: Shape) -> Layer:
    """Is never checkpointed."""
    states = shape.tokens * model.hidden
    inputs = [Saved("convolution, in and out", states, count=2), *norm(shape.tokens, model.hidden)]
    if model.dropout:
        inputs.append(Saved("dropout masks", states, MASK))
    return Layer(tuple(inputs), ())


def drops_of(model: ModelConfig) -> Drops:
    return Drops(model.dropout > 0, model.attention_dropout > 0)
