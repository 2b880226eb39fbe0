"""What one layer saves for its backward pass: the tensors that autograd saves, each storage once, without parameters.

Attention kernels differ in what they save. `gpu` is attention in half precision: flash attention without dropout, the
fused kernels of encoder_core/kernels with dropout and for all relative forms. Both save their operands, their result
and one sum for each query and head, and nothing that grows with the square of a row. So rows of mixed lengths save as
much as full rows of their mean length. In the norm of a residual sum, dropout saves a key for each token there, from
which its kernel hashes the mask again; elsewhere it saves a mask. `cpu` is training on a CPU:
encoder_core/layers/cpu_attention.py, torch's attention on padded rows, and norms as written. Tests compare both with
measurements, `gpu` with kernels that are not launched. All other tensors are the same for both.

Names as in `products`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from encoder_core.cost.products import DisentangledSize, TwoStreamSize
from encoder_core.layers.cpu_pieces import local_pieces

Kernel = Literal["gpu", "cpu"]
STATE = 0  # a number of the model's working precision: 2 bytes in bf16, 4 in fp32
MASK, FP32, INDEX = 1, 4, 8


_SEGMENTS = 3  # XLNet's: two, and its classification token's


@dataclass(frozen=True)
class Saved:
    """`count` tensors of `elements` numbers, each of `width` bytes, or of the working precision if STATE."""

    what: str
    elements: int
    width: int = STATE
    count: int = 1

    def bytes(self, state: int) -> int:
        return self.elements * (self.width or state) * self.count


@dataclass(frozen=True)
class Drops:
    """Whether dropout acts on states, and on attention's probabilities. Without dropout nothing is saved for it."""

    states: bool
    scores: bool


@dataclass(frozen=True)
class Layer:
    """`count` equal layers. `inputs`: what enters each, which activation checkpointing saves. `inner`: the rest,
    which it does not.
    """

    inputs: tuple[Saved, ...]
    inner: tuple[Saved, ...]
    count: int = 1


def total(saved: Iterable[Saved], state: int) -> int:
    """Return the bytes, if a number in the working precision has `state` bytes."""
    return sum(tensor.bytes(state) for tensor in saved)


def several(saved: Iterable[Saved], count: int) -> Iterator[Saved]:
    for tensor in saved:
        yield replace(tensor, count=tensor.count * count)


def norm(rows: int, width: int) -> Iterator[Saved]:
    """Yield what LayerNorm saves: its input, and mean and deviation of each row."""
    yield Saved("LayerNorm inputs", rows * width)
    yield Saved("LayerNorm statistics", rows, FP32, 2)


def rms_norm(rows: int, width: int, kernel: Kernel, normalised: str = "normalised") -> Iterator[Saved]:
    """Yield what RMSNorm saves: its input and the deviation of each row; on a CPU torch's also saves the normalised
    input.
    """
    yield Saved("RMSNorm inputs", rows * width)
    yield from _of_rms_norm(rows, width, kernel, normalised)


def _of_rms_norm(rows: int, width: int, kernel: Kernel, normalised: str = "normalised") -> Iterator[Saved]:
    yield Saved("RMSNorm statistics", rows, FP32)
    if kernel == "cpu":
        yield Saved(normalised, rows * width, FP32)


def normed_sum(rows: int, width: int, kernel: Kernel, *, dropped: bool, rms: bool = False) -> Iterator[Saved]:
    """Yield what dropout, the sum with the residual, and its norm save."""
    yield from rms_norm(rows, width, kernel, "normalised sums") if rms else norm(rows, width)
    if dropped:
        mask = Saved("dropout masks", rows * width, MASK)
        yield Saved("dropout keys", rows, INDEX) if kernel == "gpu" else mask


def plain_layer(
    rows: int,
    length: int,
    heads: int,
    hidden: int,
    inner: int,
    *,
    kernel: Kernel,
    drops: Drops,
    causal: bool = False,
) -> Layer:
    tokens = rows * length
    if causal and kernel == "cpu" and drops.scores:
        made = rows * heads * _scores_made(length, None, causal=True)
        scores = [Saved("attention dropout masks", made, MASK)]
    else:
        scores = [*_attention(rows * heads * length, length, kernel, drops)]
    attention = [Saved("q, k, v", tokens * hidden, count=3), *scores]
    return Layer(_states(tokens, hidden), (*attention, *_block(tokens, hidden, inner, kernel, drops)))


def decoding_layer(
    rows: int, length: int, heads: int, hidden: int, inner: int, *, kernel: Kernel, drops: Drops
) -> Iterator[Saved]:
    """Yield what RetroMAE's layer saves (encoder_core/heads/shallow_decoder.py), on padded rows and with a mask."""
    tokens, scores = rows * length, rows * heads * length
    yield Saved("decoder: queries, keys, words", tokens * hidden, count=3)
    yield Saved("q, k, v", tokens * hidden, count=3)
    if kernel == "cpu" and drops.scores:
        yield Saved("decoder: who sees whom", rows * length * length, MASK)
        yield from _biased(scores, length, drops)
    else:
        yield Saved("decoder: who sees whom", rows * length * length)
        yield Saved("attention row sums", scores, FP32)
    yield from _block(tokens, hidden, inner, kernel, drops)


def layer_across(
    rows: int,
    length: int,
    read: int,
    heads: int,
    hidden: int,
    inner: int,
    *,
    kernel: Kernel,
    drops: Drops,
) -> Layer:
    """Return a decoder's layer. The encoder's states, of `read` tokens a row, are counted elsewhere."""
    own = plain_layer(rows, length, heads, hidden, inner, kernel=kernel, drops=drops, causal=True)
    tokens = rows * length
    across = [
        Saved("states that ask, q and contexts", tokens * hidden, count=3),
        Saved("k, v", rows * read * hidden, count=2),
        *_attention(rows * heads * length, read, kernel, drops),
        *normed_sum(tokens, hidden, kernel, dropped=drops.states),
    ]
    return replace(own, inner=(*own.inner, *across))


@dataclass(frozen=True)
class PreNormSize:
    """The size of a pre-norm layer, and where it has dropout: on probabilities, on attention's output, inside the
    feed-forward block.

    `shared_heads`: number of heads of keys and values.
    """

    hidden: int
    heads: int
    inner: int
    shared_heads: int
    rms_norm: bool
    drops_scores: bool
    drops_attention: bool
    drops_inner: bool


def pre_norm_layer(
    size: PreNormSize,
    rows: int,
    length: int,
    kernel: Kernel,
    *,
    normed: bool,
    window: int | None,
    causal: bool = False,
) -> Layer:
    """Return a layer. `normed`: whether attention takes normalised states, as in all layers but ModernBERT's first."""
    tokens, states = rows * length, rows * length * size.hidden
    # Only flash attention shares keys and values between heads, the others repeat them.
    shares = kernel == "gpu" and not size.drops_scores
    shared = states * size.shared_heads // size.heads if shares else states
    inner = [
        Saved("q", states),
        Saved("k, v", shared, count=2),
        *_scores_of_pre_norm(size, rows, length, kernel, window, causal=causal),
        Saved("contexts", states),
        *normed_sum(tokens, size.hidden, kernel, dropped=size.drops_attention, rms=size.rms_norm),
        Saved("feed-forward inputs", states),
        Saved("feed-forward, before and after the activation, and gated", tokens * size.inner, count=4),
    ]
    if normed:  # the layer's input is what the norm keeps
        inner.append(Saved("attention inputs", states))
        if size.rms_norm:
            inner += _of_rms_norm(tokens, size.hidden, kernel)
        else:
            inner.append(Saved("LayerNorm statistics", tokens, FP32, 2))
    if size.drops_inner:
        inner.append(Saved("dropout masks", tokens * size.inner, MASK))
    return Layer(_states(tokens, size.hidden), tuple(inner))


def _scores_of_pre_norm(
    size: PreNormSize, rows: int, length: int, kernel: Kernel, window: int | None, *, causal: bool
) -> Iterator[Saved]:
    """Yield what attention saves. On a CPU torch's fused kernel runs without dropout if the window holds the row,
    else `blocked`.
    """
    local = window is not None and length > window + 1
    if kernel == "gpu" or not (local or size.drops_scores):
        yield Saved("attention row sums", rows * size.heads * length, FP32)
    elif size.drops_scores:
        scores = _scores_made(length, window, causal=causal)
        yield Saved("attention dropout masks", rows * size.heads * scores, MASK)


def _scores_made(length: int, window: int | None, *, causal: bool) -> int:
    """Return how many scores of a row and head the CPU's `blocked` kernel makes."""
    pieces = local_pieces(((0, length),), 1, window, causal=causal)
    return sum((queries.stop - queries.start) * (keys.stop - keys.start) for _, queries, keys, _ in pieces)


def relative_key_layer(
    rows: int, length: int, heads: int, hidden: int, inner: int, sides: int, *, kernel: Kernel, drops: Drops
) -> Layer:
    """Return a layer with learned relative positions.

    On a GPU each side has its own copy of the table, head by head. On a CPU the scores of distances are gathered from
    products with the table, which are saved, and enter as a bias.
    """
    tokens, scores = rows * length, rows * heads * length
    attention = [Saved("q, k, v", tokens * hidden, count=3)]
    if kernel == "gpu":
        attention += [
            Saved("positions in order of distance", (2 * length - 1) * hidden, count=sides),
            *_attention(scores, length, kernel, drops),
        ]
    else:
        attention += [
            Saved("operands of products with positions", tokens * hidden, count=sides),
            Saved("products with positions", scores * (2 * length - 1), count=sides),
            Saved("places of positions", length * length, INDEX),
            *_biased(scores, length, drops),
        ]
    return Layer(_states(tokens, hidden), (*attention, *_block(tokens, hidden, inner, kernel, drops)))


def disentangled_layer(
    size: DisentangledSize, rows: int, length: int, *, kernel: Kernel, drops: Drops
) -> Layer:
    """Return a DeBERTa layer for all tokens."""
    tokens, scores = rows * length, rows * size.heads * length
    attention = [
        *_by_distance(size, tokens, tokens, length),
        *_attention(scores, length, kernel, drops, written=True),
    ]
    if kernel == "cpu":
        attention.append(Saved("probabilities", scores * length))
    inner = (*_positions(size, drops), *attention, *_block(tokens, size.hidden, size.inner, kernel, drops))
    return Layer(_states(tokens, size.hidden), inner)


def looking_again(
    size: DisentangledSize, rows: int, length: int, queries: int, *, kernel: Kernel, drops: Drops
) -> Layer:
    """Return a DeBERTa layer for `queries` tokens of each row. The states that they see are counted elsewhere."""
    asked, scores = rows * queries, rows * size.heads * queries
    if kernel == "gpu":
        attention = [
            *_by_distance(size, asked, rows * length, length),
            *_attention(scores, length, kernel, drops),
        ]
    else:
        attention = [*_looked_up(size, rows, length, queries), *_biased(scores, length, drops)]
    inner = (*_positions(size, drops), *attention, *_block(asked, size.hidden, size.inner, kernel, drops))
    return Layer(_states(asked, size.hidden), inner)


def two_stream_layer(
    size: TwoStreamSize, rows: int, length: int, queries: int, *, kernel: Kernel, drops: Drops, orders: int
) -> Layer:
    """Return an XLNet layer: the content stream of all tokens, and the query stream of `queries` targets a row.

    `orders`: number of reading directions; 2 if some rows are reversed.
    """
    keys = rows * (size.carried + length) * size.hidden
    shared = [Saved("memory and row", keys), Saved("v", keys)]
    if kernel == "gpu":
        shared.append(Saved("k", keys))
        shared.append(Saved("positions in order of distance", size.places * size.hidden))
    streams = [
        tensor
        for asked in (length, queries)
        for tensor in _stream(size, rows, length, asked, kernel=kernel, drops=drops, orders=orders)
    ]
    inputs = (*_states(rows * length, size.hidden), *_states(rows * queries, size.hidden))
    return Layer(inputs, (*shared, *streams))


def _stream(
    size: TwoStreamSize, rows: int, length: int, queries: int, *, kernel: Kernel, drops: Drops, orders: int
) -> Iterator[Saved]:
    asked, scores, keys = rows * queries, rows * size.heads * queries, size.carried + length
    yield Saved("q, for contents, distances and segments", asked * size.hidden, count=3)
    if kernel == "gpu":
        yield Saved("products with segments", scores * 2)
        yield from _attention(scores, keys, kernel, drops)
    else:
        yield Saved("k", rows * keys * size.hidden)
        yield Saved("segments beside q and k", (asked + rows * keys) * size.heads * _SEGMENTS)
        yield Saved("positions in order of distance", size.places * size.hidden * orders)
        yield Saved("probabilities", scores * keys)
        yield from _attention(scores, keys, kernel, drops, written=True)
    if drops.states:
        yield Saved("dropout masks", asked * size.inner, MASK)
    yield from _block(asked, size.hidden, size.inner, kernel, drops)


def _states(tokens: int, hidden: int) -> tuple[Saved, ...]:
    return (Saved("layer inputs", tokens * hidden),)


def _block(tokens: int, hidden: int, inner: int, kernel: Kernel, drops: Drops) -> Iterator[Saved]:
    """Yield a layer without its attention: the input of the output projection, two residual sums with dropout and
    LayerNorm, and the feed-forward block.
    """
    yield Saved("contexts", tokens * hidden)
    yield Saved("feed-forward inputs", tokens * hidden)
    yield Saved("feed-forward, before and after the activation", tokens * inner, count=2)
    yield from several(normed_sum(tokens, hidden, kernel, dropped=drops.states), 2)


def _attention(
    rows: int, keys: int, kernel: Kernel, drops: Drops, *, written: bool = False
) -> Iterator[Saved]:
    """Yield what attention saves besides operands and contexts, for `rows` of scores over all heads.

    On a CPU a fused kernel runs without dropout, unless the kernel is a `written` one.
    """
    if kernel == "gpu" or not (drops.scores or written):
        yield Saved("attention row sums", rows, FP32)
    elif drops.scores:
        yield Saved("attention dropout masks", rows * keys, MASK)


def _biased(rows: int, keys: int, drops: Drops) -> Iterator[Saved]:
    """Yield what CPU attention with a trained bias saves: probabilities, and with dropout also dropped probabilities
    and masks.
    """
    yield Saved("probabilities", rows * keys, count=2 if drops.scores else 1)
    if drops.scores:
        yield Saved("attention dropout masks", rows * keys, MASK)


def _positions(size: DisentangledSize, drops: Drops) -> Iterator[Saved]:
    """Yield the table of positions after dropout."""
    yield Saved("position table", size.places * size.hidden)
    if drops.states:
        yield Saved("dropout masks", size.places * size.hidden, MASK)


def _by_distance(size: DisentangledSize, asked: int, tokens: int, length: int) -> Iterator[Saved]:
    """Yield the operands of disentangled attention without padding; its tables are expanded by distance."""
    yield Saved("q", asked * size.hidden)
    yield Saved("k, v", tokens * size.hidden, count=2)
    yield Saved("positions in order of distance", (2 * length - 1) * size.hidden, count=2)


def _looked_up(size: DisentangledSize, rows: int, length: int, queries: int) -> Iterator[Saved]:
    """Yield what padded disentangled attention saves up to its bias: scores of positions are gathered from products,
    which are saved.
    """
    tokens, asked = rows * length * size.hidden, rows * queries * size.hidden
    yield Saved("q, and its copy for products", asked, count=2)
    yield Saved("k, v, and k's copy for products", tokens, count=3)
    yield Saved("positions, copied for each row", rows * size.places * size.hidden, count=2)
    for side in (queries, length):
        yield Saved("products with positions", rows * size.heads * side * size.places)
