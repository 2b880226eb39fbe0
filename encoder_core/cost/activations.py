"""What the forward pass of a network saves for the backward pass, family by family; terms add theirs
(encoder_core/objectives).

Rows are assumed to be full. The figures are within 3 % of what torch.autograd.graph.saved_tensors_hooks sees in small
networks (tests check every family, and random shapes to 10 %). The head never stores all logits but its gradients;
the largest is that of the word embeddings, in fp32 (encoder_core/heads/cross_entropy.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from encoder_core.cost.flops import disentangled_size, two_stream_size
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
    layer_across,
    norm,
    plain_layer,
    pre_norm_layer,
    relative_key_layer,
    rms_norm,
    several,
    total,
    two_stream_layer,
)
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import Deberta, DebertaConfig, DebertaV2Config
from encoder_core.families.pre_norm import PreNormConfig
from encoder_core.families.xlnet import XlnetConfig


def kept_by_embeddings(model: ModelConfig, shape: Shape, kernel: Kernel = "gpu") -> Iterator[Saved]:
    """Yield ids, the inputs of LayerNorm, dropout masks, and the inputs of a projection if widths differ.

    Pre-norm encoders also save the angles of rotary positions, which all layers share, and the inputs of the last norm.
    """
    if isinstance(model, PreNormConfig):
        yield from _around_pre_norm_layers(model, shape, kernel)
        return
    wide = model.embedding_width
    yield Saved("ids", shape.tokens, INDEX, 1 if isinstance(model, Deberta) else 3)
    yield from norm(shape.tokens, wide)
    if model.dropout:
        yield Saved("dropout masks", shape.tokens * wide, MASK)
    if model.projects_embeddings:
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
    """Yield all layers for all tokens, without the last `but` layers."""
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
    plain = plain_layer(*sizes, kernel=kernel, drops=drops, causal=shape.causal)
    yield replace(plain, count=count)


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
            size,
            shape.rows,
            shape.length,
            kernel,
            normed=model.normed(layer),
            window=model.window(layer),
            causal=shape.causal,
        )


def _convolution(model: DebertaV2Config, shape: Shape) -> Layer:
    """Return what the convolution saves; it is never checkpointed."""
    states = shape.tokens * model.hidden
    inputs = [Saved("convolution, in and out", states, count=2), *norm(shape.tokens, model.hidden)]
    if model.dropout:
        inputs.append(Saved("dropout masks", states, MASK))
    return Layer(tuple(inputs), ())


def drops_of(model: ModelConfig) -> Drops:
    return Drops(model.dropout > 0, model.attention_dropout > 0)


@dataclass(frozen=True)
class Activations:
    """The tensors that are saved between the forward and the backward pass of one microbatch.

    Attributes:
        outside: tensors outside of layers.
        layers: tensors of the layers.
    """

    outside: tuple[Saved, ...]
    layers: tuple[Layer, ...]

    def bytes(self, state: int) -> int:
        """Return the bytes of all tensors, if a number in the working precision has `state` bytes."""
        layers = sum(layer.count * total((*layer.inputs, *layer.inner), state) for layer in self.layers)
        return total(self.outside, state) + layers

    def tensors(self) -> list[Saved]:
        """Return all tensors; those of one kind and size are one entry."""
        counts: dict[Saved, int] = {}
        layers = (
            replace(tensor, count=tensor.count * layer.count)
            for layer in self.layers
            for tensor in (*layer.inputs, *layer.inner)
        )
        for tensor in (*self.outside, *layers):
            kind = replace(tensor, count=1)
            counts[kind] = counts.get(kind, 0) + tensor.count
        return [replace(kind, count=count) for kind, count in counts.items()]

    def checkpointed(self, state: int) -> int:
        """Return the bytes that activation checkpointing saves: the layers' inputs, and what is outside of layers."""
        return total(self.outside, state) + sum(
            layer.count * total(layer.inputs, state) for layer in self.layers
        )

    def one_layer(self, state: int) -> int:
        """Return the bytes of the inside of the largest layer, which checkpointing recomputes in the backward pass."""
        return max(total(layer.inner, state) for layer in self.layers)

    def __add__(self, other: "Activations") -> "Activations":
        return Activations(self.outside + other.outside, self.layers + other.layers)


def head_peak(state: int, logits: int) -> int:
    """Return the bytes of the head's work on a chunk of `logits`.

    These are scores and log-probabilities in fp32; in bf16 also the scores and their gradient in bf16.
    """
    return logits * (2 * FP32 + (2 * state if state < FP32 else 0))


def kept_by_head(model: ModelConfig, targets: int, places: str = "targets") -> Iterator[Saved]:
    """Yield what the masked-language-model head saves for `targets` states, and their positions, which are called
    `places`.
    """
    width = model.embedding_width
    if not model.bare_head:
        yield from _transform(model.hidden, width, targets)
    yield from kept_by_decoder(width, model.vocabulary, targets, bias=model.decoder_bias)
    yield Saved(f"positions of {places}", targets, INDEX)


def _transform(hidden: int, width: int, targets: int) -> Iterator[Saved]:
    """Yield what the Linear, activation and LayerNorm before the decoder save."""
    yield Saved("head: states of targets", targets * hidden)
    yield Saved("head: before the activation", targets * width)
    yield from norm(targets, width)


def kept_by_decoder(width: int, vocabulary: int, targets: int, *, bias: bool = True) -> Iterator[Saved]:
    """Yield what the cross-entropy saves: its gradients."""
    yield Saved("head: gradient of features", targets * width)
    yield Saved("head: gradient of the decoder", vocabulary * (width + bias), FP32)


def kept_by_decoding(model: BartConfig, shape: Shape, read: int, kernel: Kernel) -> Activations:
    """Return what a decoder saves, and the encoder's states, of `read` tokens a row, which all its layers share."""
    layer = layer_across(
        shape.rows,
        shape.length,
        read,
        model.heads,
        model.hidden,
        model.feed_forward,
        kernel=kernel,
        drops=drops_of(model),
    )
    states = Saved("encoder's states", shape.rows * read * model.hidden)
    embeddings = kept_by_embeddings(model, shape, kernel)
    return Activations((*embeddings, states), (replace(layer, count=model.layers),))


def kept_by_two_streams(model: XlnetConfig, shape: Shape, kernel: Kernel) -> Activations:
    """Return what XLNet's streams save.

    It includes the last layer's content stream, which is not used for predictions and is freed when the forward pass
    ends.
    """
    size = two_stream_size(model, shape.length, shape.backwards)
    keys = size.carried + shape.length
    asked = shape.tokens + shape.targets
    outside = [Saved("ids", shape.tokens, INDEX), Saved("distance table", size.places * model.hidden, FP32)]
    if model.dropout:
        outside.append(Saved("dropout masks", asked * model.hidden, MASK, 2))
    if kernel == "cpu":
        outside.append(Saved("who sees whom", asked * keys))
    layer = two_stream_layer(
        size,
        shape.rows,
        shape.length,
        shape.targets_per_row,
        kernel=kernel,
        drops=drops_of(model),
        orders=1 + shape.backwards,
    )
    return Activations(tuple(outside), (replace(layer, count=model.layers),))
