"""What one layer keeps for its backward pass: the tensors that autograd saves, each storage once, without parameters.

Attention kernels differ in what they keep. `gpu` is FlashAttention for plain attention, and torch's memory-efficient
attention with a bias for the other forms; both keep the sum of each row of scores, and no probabilities. `cpu` is what
training runs on a CPU: encoder_core/layers/cpu_attention.py, and torch's unfused attention. Tests compare the formulas
with measurements for `cpu`. All other tensors are the same for both.

Names as in `products`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from encoder_core.cost.products import DisentangledSize, TwoStreamSize
from encoder_core.layers.cpu_attention import local_pieces

Kernel = Literal["gpu", "cpu"]
STATE = 0  # a number of the model's working precision: 2 bytes in bf16, 4 in fp32
MASK, FP32, INDEX = 1, 4, 8


@dataclass(frozen=True)
class Saved:
    """`count` tensors of `elements` numbers, each of `width` bytes, or of the working precision with STATE."""

    what: str
    elements: int
    width: int = STATE
    count: int = 1

    def bytes(self, state: int) -> int:
        return self.elements * (self.width or state) * self.count


@dataclass(frozen=True)
class Layer:
    """`count` equal layers: what enters each, which activation checkpointing keeps, and what it does not."""

    inputs: tuple[Saved, ...]
    inner: tuple[Saved, ...]
    count: int = 1


def total(saved: Iterable[Saved], state: int) -> int:
    """Bytes, where a number of the working precision has `state`."""
    return sum(tensor.bytes(state) for tensor in saved)


def several(saved: Iterable[Saved], count: int) -> Iterator[Saved]:
    for tensor in saved:
        yield replace(tensor, count=tensor.count * count)


def norm(rows: int, width: int) -> Iterator[Saved]:
    """LayerNorm keeps its input, and mean and deviation of each row."""
    yield Saved("LayerNorm inputs", rows * width)
    yield Saved("LayerNorm statistics", rows, FP32, 2)


def rms_norm(rows: int, width: int, kernel: Kernel) -> Iterator[Saved]:
    """RMSNorm keeps its input and the deviation of each row; torch's on a CPU also what it made of the input."""
    yield Saved("RMSNorm inputs", rows * width)
    yield from _of_rms_norm(rows, width, kernel)


def _of_rms_norm(rows: int, width: int, kernel: Kernel) -> Iterator[Saved]:
    yield Saved("RMSNorm statistics", rows, FP32)
    if kernel == "cpu":
        yield Saved("normalised", rows * width, FP32)


def plain_layer(rows: int, length: int, heads: int, hidden: int, inner: int, kernel: Kernel) -> Layer:
    tokens = rows * length
    attention = [
        Saved("q, k, v", tokens * hidden, count=3),
        *_fused(rows * heads * length, length, kernel, 0),
    ]
    return Layer(_states(tokens, hidden), (*attention, *_block(tokens, hidden, inner)))


@dataclass(frozen=True)
class PreNormSize:
    """A pre-norm layer, and where it drops: attention's probabilities, what attention adds, inside the feed-forward
    block. What does not drop keeps no mask. `shared_heads`: of keys and values."""

    hidden: int
    heads: int
    inner: int
    shared_heads: int
    rms_norm: bool
    drops_scores: bool
    drops_attention: bool
    drops_inner: bool


def pre_norm_layer(
    size: PreNormSize, rows: int, length: int, kernel: Kernel, *, normed: bool, window: int | None
) -> Layer:
    """`normed`: attention takes normalised states, as in all layers but ModernBERT's first."""
    tokens, states = rows * length, rows * length * size.hidden
    # Kernels of the CPU repeat shared keys and values.
    shared = states * size.shared_heads // size.heads if kernel == "gpu" else states
    inner = [
        Saved("q", states),
        Saved("k, v", shared, count=2),
        *_scores_of_pre_norm(size, rows, length, kernel, window),
        Saved("contexts", states),
        *(rms_norm(tokens, size.hidden, kernel) if size.rms_norm else norm(tokens, size.hidden)),
        Saved("feed-forward inputs", states),
        Saved("feed-forward, before and after the activation, and gated", tokens * size.inner, count=4),
    ]
    if normed:  # the layer's input is what the norm keeps
        inner.append(Saved("attention inputs", states))
        if size.rms_norm:
            inner += _of_rms_norm(tokens, size.hidden, kernel)
        else:
            inner.append(Saved("LayerNorm statistics", tokens, FP32, 2))
    if size.drops_attention:
        inner.append(Saved("dropout masks", states, MASK))
    if size.drops_inner:
        inner.append(Saved("dropout masks", tokens * size.inner, MASK))
    return Layer(_states(tokens, size.hidden), tuple(inner))


def _scores_of_pre_norm(
    size: PreNormSize, rows: int, length: int, kernel: Kernel, window: int | None
) -> Iterator[Saved]:
    """On a CPU, torch's fused kernel where nothing is dropped and the window holds the row, else `blocked`."""
    local = window is not None and length > window + 1
    if kernel == "gpu" or not (local or size.drops_scores):
        yield Saved("attention row sums", rows * size.heads * length, FP32)
    elif size.drops_scores:
        pieces = local_pieces(((0, length),), 1, window)
        scores = sum(
            (queries.stop - queries.start) * (keys.stop - keys.start) for _, queries, keys, _heads in pieces
        )
        yield Saved("attention dropout masks", rows * size.heads * scores, MASK)


def relative_key_layer(
    rows: int, length: int, heads: int, hidden: int, inner: int, sides: int, kernel: Kernel
) -> Layer:
    """Scores of distances are picked from products with the table, which are kept, and join as a bias."""
    tokens, scores = rows * length, rows * heads * length
    attention = [
        Saved("q, k, v", tokens * hidden, count=3),
        Saved("operands of products with positions", tokens * hidden, count=sides),
        Saved("products with positions", scores * (2 * length - 1), count=sides),
        Saved("places of positions", length * length, INDEX),
        *_biased(scores, length, kernel),
    ]
    return Layer(_states(tokens, hidden), (*attention, *_block(tokens, hidden, inner)))


def disentangled_layer(size: DisentangledSize, rows: int, length: int, kernel: Kernel) -> Layer:
    """Of DeBERTa's layers, one for all tokens."""
    tokens, scores = rows * length, rows * size.heads * length
    if kernel == "gpu":
        attention = [*_looked_up(size, rows, length, length), *_biased(scores, length, kernel)]
    else:
        attention = [
            Saved("q, k, v", tokens * size.hidden, count=3),
            Saved("positions in order of distance", (2 * length - 1) * size.hidden, count=2),
            *_fused(scores, length, kernel, 1),
        ]
    inner = (*_positions(size), *attention, *_block(tokens, size.hidden, size.inner))
    return Layer(_states(tokens, size.hidden), inner)


def looking_again(size: DisentangledSize, rows: int, length: int, queries: int, kernel: Kernel) -> Layer:
    """Of DeBERTa's layers, one for `queries` tokens of each row. The states that they look at are kept elsewhere."""
    asked = rows * queries
    attention = [
        *_looked_up(size, rows, length, queries),
        *_biased(rows * size.heads * queries, length, kernel),
    ]
    inner = (*_positions(size), *attention, *_block(asked, size.hidden, size.inner))
    return Layer(_states(asked, size.hidden), inner)


def two_stream_layer(size: TwoStreamSize, rows: int, length: int, queries: int, kernel: Kernel) -> Layer:
    """XLNet's: the content stream of all tokens, and the query stream of `queries` targets a row."""
    keys = rows * (size.carried + length) * size.hidden
    copies = 1 if kernel == "gpu" else 2  # unfused attention makes its own for each stream
    shared = (Saved("memory and row", keys), Saved("k, v", keys, count=2 * copies))
    streams = [tensor for asked in (length, queries) for tensor in _stream(size, rows, length, asked, kernel)]
    inputs = (*_states(rows * length, size.hidden), *_states(rows * queries, size.hidden))
    return Layer(inputs, (*shared, *streams))


def _stream(size: TwoStreamSize, rows: int, length: int, queries: int, kernel: Kernel) -> Iterator[Saved]:
    asked, scores, keys = rows * queries, rows * size.heads * queries, size.carried + length
    yield Saved("q, for contents, distances and segments", asked * size.hidden, count=3)
    yield Saved("positions, copied for each row", rows * size.places * size.hidden)
    yield Saved("products with positions", scores * size.places)
    yield Saved("what is hidden", rows * queries * keys, MASK)
    if kernel == "gpu":
        yield Saved("attention biases", scores * keys)
        yield Saved("attention row sums", scores, FP32)
        yield Saved("contexts before who sees nobody gets zeros", asked * size.hidden)
    else:
        yield Saved("probabilities", scores * keys, count=2)
        yield Saved("attention dropout masks", scores * keys, MASK)
    yield Saved("dropout masks", asked * size.inner, MASK)
    yield from _block(asked, size.hidden, size.inner)


def _states(tokens: int, hidden: int) -> tuple[Saved, ...]:
    return (Saved("layer inputs", tokens * hidden),)


def _block(tokens: int, hidden: int, inner: int) -> Iterator[Saved]:
    """A layer but for its attention: what that gives to its output projection, two residual sums with dropout and
    LayerNorm, and the feed-forward between."""
    yield Saved("contexts", tokens * hidden)
    yield Saved("feed-forward inputs", tokens * hidden)
    yield Saved("feed-forward, before and after the activation", tokens * inner, count=2)
    yield Saved("dropout masks", tokens * hidden, MASK, 2)
    yield from several(norm(tokens, hidden), 2)


def _fused(rows: int, keys: int, kernel: Kernel, probabilities: int) -> Iterator[Saved]:
    """Attention without a bias, or with one of its own making; `rows` of scores over all heads."""
    if kernel == "gpu":
        yield Saved("attention row sums", rows, FP32)
    else:
        yield Saved("attention dropout masks", rows * keys, MASK)
        yield Saved("probabilities", rows * keys, count=probabilities)


def _biased(rows: int, keys: int, kernel: Kernel) -> Iterator[Saved]:
    """Attention with a bias that has a gradient. Unfused: probabilities, before and after dropout, and its masks."""
    if kernel == "gpu":
        yield Saved("attention biases", rows * keys)
        yield Saved("attention row sums", rows, FP32)
    else:
        yield Saved("attention dropout masks", rows * keys, MASK)
        yield Saved("probabilities", rows * keys, count=2)


def _positions(size: DisentangledSize) -> Iterator[Saved]:
    """The table of positions after dropout."""
    yield Saved("position table", size.places * size.hidden)
    yield Saved("dropout masks", size.places * size.hidden, MASK)


def _looked_up(size: DisentangledSize, rows: int, length: int, queries: int) -> Iterator[Saved]:
    """Padded disentangled attention up to its bias: scores of positions are picked from products, which are kept."""
    tokens, asked = rows * length * size.hidden, rows * queries * size.hidden
    yield Saved("q, and its copy for products", asked, count=2)
    yield Saved("k, v, and k's copy for products", tokens, count=3)
    yield Saved("positions, copied for each row", rows * size.places * size.hidden, count=2)
    for side in (queries, length):
        yield Saved("products with positions", rows * size.heads * side * size.places)
