"""RetroMAE (Xiao et al. 2022, arXiv 2205.12035), as a recipe describes it. How it is computed:
`objectives/retromae.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from encoder_core.cost.activations import Activations, drops_of, kept_by_head
from encoder_core.cost.flops import head
from encoder_core.cost.products import Product, Shape, plain_layer
from encoder_core.cost.saved import INDEX, MASK, Saved, decoding_layer, norm
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.terms.term import BottleneckConfig


class RetromaeConfig(BottleneckConfig):
    """A row's text, predicted by a decoder of one layer from the vector of the row's first token and few of its words.

    Attributes:
        rate: probability with which each token of a row is hidden from a query of the decoder, for each query anew
            (paper: 0.5 to 0.7).
    """

    name = "retromae"
    reads = "first"

    rate: float = Field(default=0.5, gt=0, lt=1)

    def products(self, states: CountedStates) -> Iterator[Product]:
        """Yield the products of the decoder for all tokens, and of the head for all but the rows' first ones."""
        model, shape = states.model, states.shape
        yield from states.at(1)
        if model.projects_embeddings:
            yield Product("decoder: words to hidden", shape.tokens, model.embedding_width, model.hidden)
        size = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
        for product in plain_layer(*size):
            yield replace(product, what=f"decoder: {product.what}", layer=False)  # nor is it computed again
        yield from head(model, self.scored(shape))

    def keeps(self, states: CountedStates) -> Activations:
        model, shape = states.model, states.shape
        size = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
        outside = (
            *_kept_by_inputs(model, shape),
            *decoding_layer(*size, kernel=states.kernel, drops=drops_of(model)),
            *kept_by_head(model, self.scored(shape), "reconstructed tokens"),
        )
        return Activations(outside, ()) + states.at_keeps(1)

    def scored(self, shape: Shape) -> int:
        return shape.tokens - shape.rows


def _kept_by_inputs(model: ModelConfig, shape: Shape) -> Iterator[Saved]:
    """Yield what the decoder's two inputs save for the backward pass: of the queries, plain sums, only the places."""
    tokens, hidden = shape.tokens, model.hidden
    yield Saved("decoder: ids and places", tokens, INDEX, 3)
    yield from norm(tokens, hidden)
    if model.dropout:
        yield Saved("dropout masks", tokens * hidden, MASK)
    if model.projects_embeddings:
        yield Saved("decoder: words before their projection", tokens * model.embedding_width)
