"""Matrix products of the layers, part by part, and the microbatch for which they are counted.

As in torch.utils.flop_counter, an [m, k] by [k, n] product counts 2 m k n: multiplications and additions. Only matrix
products and convolutions count. Everything else (LayerNorm, softmax, dropout, the optimizer) is a few percent of the
arithmetic; it costs memory traffic, which the assumed utilisation includes.

Names: T tokens, M targets, R rows, L length of a row, K keys of a row (L, and what memory adds), Q queries of a row,
P relative positions in use, H hidden, F inner width, N heads, D = H / N, E embedding width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """The shape of a microbatch for counting: every row has `length` tokens, of which `targets_per_row` are predicted.

    `backwards`: whether some rows are read from their ends (XLNet). `causal`: whether tokens see no later token.
    """

    rows: int
    length: int
    targets_per_row: int
    backwards: bool = False
    causal: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def targets(self) -> int:
        return self.rows * self.targets_per_row

    @property
    def twice(self) -> "Shape":
        """The shape of the texts of rows that are each read twice (encoder_core/objectives/contrastive.py)."""
        return Shape(2 * self.rows, self.length, 0)


@dataclass(frozen=True)
class Product:
    """`count` products of an [m, k] by a [k, n] matrix.

    Attributes:
        what: name for people to read.
        derivatives: number of products of the same size in the backward pass: 2 if both factors have a gradient, 1 if
            one has, 0 if the result does not reach the loss.
        layer: whether it is inside a layer, so that activation checkpointing runs it once more.
    """

    what: str
    m: int
    k: int
    n: int
    count: int = 1
    derivatives: int = 2
    layer: bool = False

    @property
    def forward(self) -> int:
        return 2 * self.m * self.k * self.n * self.count

    @property
    def backward(self) -> int:
        return self.derivatives * self.forward


@dataclass(frozen=True)
class Count:
    """FLOPs of one microbatch. `recomputed`: those of the layers' forward pass, which activation checkpointing runs
    again.
    """

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """FLOPs without recomputation, which define the utilisation."""
        return self.forward + self.backward


def count(products: list[Product]) -> Count:
    return Count(
        sum(product.forward for product in products),
        sum(product.backward for product in products),
        sum(product.forward for product in products if product.layer),
    )


def times(products: Iterator[Product], count: int) -> Iterator[Product]:
    """Yield each product `count` times."""
    for product in products:
        yield replace(product, count=product.count * count)


def without_gradient(products: Iterator[Product]) -> Iterator[Product]:
    """Yield the products without backward pass, because their results do not reach the loss."""
    for product in products:
        yield replace(product, derivatives=0)


def feed_forward(tokens: int, hidden: int, inner: int) -> Iterator[Product]:
    yield Product("feed-forward", tokens, hidden, inner, 2, layer=True)


def gated_feed_forward(tokens: int, hidden: int, inner: int) -> Iterator[Product]:
    """Yield the products of a gated block: two halves of `inner` in, one out (encoder_core/layers/encoder.py).

    Nothing is saved after the second, so checkpointing does not run it again.
    """
    yield Product("feed-forward", tokens, hidden, inner, 2, layer=True)
    yield Product("feed-forward", tokens, inner, hidden)


def pairs_in_sight(length: int, window: int | None, *, causal: bool = False) -> int:
    """Return the number of pairs of query and key in a row that are at most `window` tokens apart; None: all pairs.

    `causal`: without those whose key is later.
    """
    reach = length - 1 if window is None else min(window, length - 1)
    before = length * reach - reach * (reach + 1) // 2
    return length + (before if causal else 2 * before)


def attention(
    rows: int, queries: int, keys: int, heads: int, hidden: int, *, causal: bool = False
) -> Iterator[Product]:
    """Yield scores and weighted values: two products of [Q, D] by [D, K] for each row and head, one of them
    transposed.

    `causal`: only of the pairs in sight, as kernels that leave out what nobody sees compute them; the tokens are the
    queries.
    """
    if causal:
        pairs = pairs_in_sight(queries, None, causal=True)
        yield Product(
            "causal attention q k' and p v", 1, hidden // heads, pairs, 2 * rows * heads, layer=True
        )
        return
    yield Product("attention q k' and p v", queries, hidden // heads, keys, 2 * rows * heads, layer=True)


def projections(tokens: int, hidden: int, count: int) -> Iterator[Product]:
    yield Product("q, k, v, output projections", tokens, hidden, hidden, count, layer=True)


def plain_layer(
    rows: int, length: int, heads: int, hidden: int, inner: int, *, causal: bool = False
) -> Iterator[Product]:
    """Yield query, key, value and output projections, attention, feed-forward (encoder_core/layers/encoder.py)."""
    yield from projections(rows * length, hidden, 4)
    yield from attention(rows, length, length, heads, hidden, causal=causal)
    yield from feed_forward(rows * length, hidden, inner)


def pre_norm_layer(
    rows: int,
    length: int,
    heads: int,
    hidden: int,
    inner: int,
    *,
    shared: int,
    window: int | None,
    causal: bool = False,
) -> Iterator[Product]:
    """Yield the products of `plain_layer` with a gated feed-forward block, keys and values `shared` wide, and
    attention in a window.
    """
    yield from projections(rows * length, hidden, 2)
    yield Product("q, k, v, output projections", rows * length, hidden, shared, 2, layer=True)
    if window is None:
        yield from attention(rows, length, length, heads, hidden, causal=causal)
    else:
        pairs = pairs_in_sight(length, window, causal=causal)
        yield Product("local attention q k' and p v", 1, hidden // heads, pairs, 2 * rows * heads, layer=True)
    yield from gated_feed_forward(rows * length, hidden, inner)


def relative_key_scores(rows: int, length: int, heads: int, hidden: int, sides: int) -> Iterator[Product]:
    """Yield the scores of a vector for each of the 2 L - 1 distances, from queries or from both sides."""
    yield Product(
        "scores of relative positions",
        rows * heads * length,
        hidden // heads,
        2 * length - 1,
        sides,
        layer=True,
    )


def layer_across(rows: int, length: int, read: int, heads: int, hidden: int, inner: int) -> Iterator[Product]:
    """Yield a decoder's layer (encoder_core/layers/cross_attention.py): a causal one, and attention to `read` tokens of
    an encoder in each row.
    """
    yield from plain_layer(rows, length, heads, hidden, inner, causal=True)
    yield from projections(rows * length, hidden, 2)
    yield from projections(rows * read, hidden, 2)
    yield from attention(rows, length, read, heads, hidden)


@dataclass(frozen=True)
class DisentangledSize:
    """The size of a DeBERTa layer. `places`: number of relative positions in use. `fused`: whether query, key and
    value are one matrix, as in version 1.
    """

    hidden: int
    heads: int
    inner: int
    places: int
    fused: bool


def disentangled_layer(
    size: DisentangledSize, rows: int, length: int, queries: int | None = None, *, causal: bool = False
) -> Iterator[Product]:
    """Yield one layer for `queries` of each row that see all of it; None: the tokens themselves.

    It is counted with the padded kernel, which GPUs run (encoder_core/layers/deberta_attention.py).
    """
    tokens, asked = rows * length, rows * (length if queries is None else queries)
    of_tokens, of_queries = (3, 3) if size.fused else (2, 1)
    yield from projections(tokens, size.hidden, of_tokens if queries is not None else 3)
    if queries is not None:
        yield from projections(asked, size.hidden, of_queries)
    yield from projections(asked, size.hidden, 1)
    yield Product("projections of positions", size.places, size.hidden, size.hidden, 2, layer=True)
    for side in (asked, tokens):
        yield Product(
            "scores of relative positions",
            side // rows,
            size.hidden // size.heads,
            size.places,
            rows * size.heads,
            layer=True,
        )
    yield from attention(rows, asked // rows, length, size.heads, size.hidden, causal=causal)
    yield from feed_forward(asked, size.hidden, size.inner)


@dataclass(frozen=True)
class TwoStreamSize:
    """The size of an XLNet layer. `carried`: number of memory tokens. `places`: number of distances in use."""

    hidden: int
    heads: int
    inner: int
    carried: int
    places: int


def shared_keys(size: TwoStreamSize, rows: int, length: int) -> Iterator[Product]:
    """Yield the products that both streams use: keys and values of memory and row, and keys of distances (sinusoids:
    no gradient).
    """
    yield from projections(rows * (size.carried + length), size.hidden, 2)
    yield Product(
        "projections of positions", size.places, size.hidden, size.hidden, derivatives=1, layer=True
    )


def stream(size: TwoStreamSize, rows: int, length: int, queries: int) -> Iterator[Product]:
    """Yield one stream of `queries` of each row (encoder_core/layers/xlnet_attention.py)."""
    width = size.hidden // size.heads
    yield from projections(rows * queries, size.hidden, 2)
    yield Product("scores of relative positions", queries, width, size.places, rows * size.heads, layer=True)
    yield Product("scores of segments", rows * queries, width, 2, size.heads, layer=True)
    yield from attention(rows, queries, size.carried + length, size.heads, size.hidden)
    yield from feed_forward(rows * queries, size.hidden, size.inner)
