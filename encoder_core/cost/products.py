"""Matrix products of the layers, part by part, and the microbatch that they are counted for.

As in torch.utils.flop_counter, an [m, k] by [k, n] product counts 2 m k n: multiplications and additions. Only matrix
products and convolutions count. Everything else (LayerNorm, softmax, dropout, the optimizer) is a few percent of the
arithmetic; it costs memory traffic, which the assumed utilisation covers.

Names: T tokens, M targets, R rows, L length of a row, K keys of a row (L, and what memory adds), Q queries of a row,
P relative positions in use, H hidden, F inner width, N heads, D = H / N, E embedding width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """One microbatch for counting: every row has `length` tokens, of which `targets_per_row` are predicted.

    `backwards`: some rows are read from their ends (XLNet).
    """

    rows: int
    length: int
    targets_per_row: int
    backwards: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def targets(self) -> int:
        return self.rows * self.targets_per_row

    @property
    def twice(self) -> "Shape":
        """The texts of rows that are compared with themselves (encoder_core/objectives/contrastive.py)."""
        return Shape(2 * self.rows, self.length, 0)


@dataclass(frozen=True)
class Product:
    """`count` products of an [m, k] by a [k, n] matrix.

    Attributes:
        what: a name for people to read.
        derivatives: products of the same size in the backward pass: 2 where both factors have a gradient, 1 where
            one has, 0 where the outcome does not reach the loss.
        layer: inside a layer, so that activation checkpointing runs it once more.
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
    """FLOPs of one microbatch. `recomputed`: the layers' forward pass, which activation checkpointing runs again."""

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """Without recomputation: what utilisation is measured by."""
        return self.forward + self.backward


def count(products: list[Product]) -> Count:
    return Count(
        sum(product.forward for product in products),
        sum(product.backward for product in products),
        sum(product.forward for product in products if product.layer),
    )


def times(products: Iterator[Product], count: int) -> Iterator[Product]:
    """Each of them `count` times."""
    for product in products:
        yield replace(product, count=product.count * count)


def without_gradient(products: Iterator[Product]) -> Iterator[Product]:
    """Those whose outcome does not reach the loss."""
    for product in products:
        yield replace(product, derivatives=0)


def feed_forward(tokens: int, hidden: int, inner: int) -> Iterator[Product]:
    yield Product("feed-forward", tokens, hidden, inner, 2, layer=True)


def gated_feed_forward(tokens: int, hidden: int, inner: int) -> Iterator[Product]:
    """Two halves of `inner` in, one out (encoder_core/layers/encoder.py). Nothing that is kept comes after the latter,
    so checkpointing does not run it again."""
    yield Product("feed-forward", tokens, hidden, inner, 2, layer=True)
    yield Product("feed-forward", tokens, inner, hidden)


def pairs_in_sight(length: int, window: int | None) -> int:
    """Queries and keys of a row that are at most `window` tokens apart; None: all."""
    reach = length - 1 if window is None else min(window, length - 1)
    return length * (2 * reach + 1) - reach * (reach + 1)


def attention(rows: int, queries: int, keys: int, heads: int, hidden: int) -> Iterator[Product]:
    """Scores and weighted values: two products of [Q, D] by [D, K] a row and head, one of them the other way round."""
    yield Product("attention q k' and p v", queries, hidden // heads, keys, 2 * rows * heads, layer=True)


def projections(tokens: int, hidden: int, count: int) -> Iterator[Product]:
    yield Product("q, k, v, output projections", tokens, hidden, hidden, count, layer=True)


def plain_layer(rows: int, length: int, heads: int, hidden: int, inner: int) -> Iterator[Product]:
    """Query, key, value and output projections, attention, feed-forward (encoder_core/layers/encoder.py)."""
    yield from projections(rows * length, hidden, 4)
    yield from attention(rows, length, length, heads, hidden)
    yield from feed_forward(rows * length, hidden, inner)


def pre_norm_layer(
    rows: int, length: int, heads: int, hidden: int, inner: int, *, shared: int, window: int | None
) -> Iterator[Product]:
    """As `plain_layer`, with a gated feed-forward block, keys and values `shared` wide, and attention to what a window
    holds."""
    yield from projections(rows * length, hidden, 2)
    yield Product("q, k, v, output projections", rows * length, hidden, shared, 2, layer=True)
    if window is None:
        yield from attention(rows, length, length, heads, hidden)
    else:
        pairs = pairs_in_sight(length, window)
        yield Product("local attention q k' and p v", 1, hidden // heads, pairs, 2 * rows * heads, layer=True)
    yield from gated_feed_forward(rows * length, hidden, inner)


def relative_key_scores(rows: int, length: int, heads: int, hidden: int, sides: int) -> Iterator[Product]:
    """Scores against a vector for each of the 2 L - 1 distances, from queries or from both sides."""
    yield Product(
        "scores of relative positions",
        rows * heads * length,
        hidden // heads,
        2 * length - 1,
        sides,
        layer=True,
    )


@dataclass(frozen=True)
class DisentangledSize:
    """A layer of DeBERTa's. `places`: relative positions in use. `fused`: one matrix for query, key and value, as in
    version 1.
    """

    hidden: int
    heads: int
    inner: int
    places: int
    fused: bool


def disentangled_layer(
    size: DisentangledSize, rows: int, length: int, queries: int | None = None
) -> Iterator[Product]:
    """One layer for `queries` of each row that look at all of it; None for the tokens themselves
    (encoder_core/layers/deberta_attention.py, the padded kernel, which GPUs run)."""
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
    yield from attention(rows, asked // rows, length, size.heads, size.hidden)
    yield from feed_forward(asked, size.hidden, size.inner)


@dataclass(frozen=True)
class TwoStreamSize:
    """A layer of XLNet's. `carried`: tokens of its memory. `places`: distances in use."""

    hidden: int
    heads: int
    inner: int
    carried: int
    places: int


def shared_keys(size: TwoStreamSize, rows: int, length: int) -> Iterator[Product]:
    """What both streams look at: keys and values of memory and row, and keys of distances (sinusoids: no gradient)."""
    yield from projections(rows * (size.carried + length), size.hidden, 2)
    yield Product(
        "projections of positions", size.places, size.hidden, size.hidden, derivatives=1, layer=True
    )


def stream(size: TwoStreamSize, rows: int, length: int, queries: int) -> Iterator[Product]:
    """One stream of `queries` of each row (encoder_core/layers/xlnet_attention.py)."""
    width = size.hidden // size.heads
    yield from projections(rows * queries, size.hidden, 2)
    yield Product("scores of relative positions", queries, width, size.places, rows * size.heads, layer=True)
    yield Product("scores of segments", rows * queries, width, 2, size.heads, layer=True)
    yield from attention(rows, queries, size.carried + length, size.heads, size.hidden)
    yield from feed_forward(rows * queries, size.hidden, size.inner)
