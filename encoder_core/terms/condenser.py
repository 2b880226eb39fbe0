"""Condenser (Gao and Callan 2021, arXiv 2104.08253), as a recipe describes it. How it is computed:
`objectives/condenser.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field, PositiveInt

from encoder_core.cost.activations import Activations, drops_of, kept_by_head
from encoder_core.cost.flops import head
from encoder_core.cost.products import Product, Shape, plain_layer, times
from encoder_core.cost.saved import INDEX, Saved, several
from encoder_core.cost.saved import plain_layer as kept_by_plain_layer
from encoder_core.cost.states import CountedStates
from encoder_core.terms.term import BottleneckConfig, Refusal, Setting, SmallObjective


class CondenserConfig(BottleneckConfig):
    """Hidden tokens, predicted by a few layers from early states of all tokens and the last state of the first one.

    Attributes:
        early: number of the layer whose states the head reads; 0 the embeddings. None: half of the model's layers, as
            in the paper (6 of 12).
        layers: number of layers of the head (paper: 2).
    """

    name = "condenser"
    reads = "layers"

    early: int | None = Field(default=None, ge=0)
    layers: PositiveInt = 2

    def early_layer(self, layers: int) -> int:
        """Return `early` of a model with so many layers."""
        return layers // 2 if self.early is None else self.early

    def products(self, states: CountedStates) -> Iterator[Product]:
        """Yield the products of the head's layers, for all tokens, and of mlm's head at the targets."""
        model, shape = states.model, states.shape
        layer = plain_layer(shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
        for product in times(layer, self.layers):
            yield replace(product, what=f"condenser: {product.what}", layer=False)  # nor is it computed again
        yield from head(model, shape.targets)

    def keeps(self, states: CountedStates) -> Activations:
        model, shape = states.model, states.shape
        size = (shape.rows, shape.length, model.heads, model.hidden, model.feed_forward)
        layer = kept_by_plain_layer(*size, kernel=states.kernel, drops=drops_of(model))
        outside = (
            Saved("condenser: rows' first tokens", shape.rows, INDEX),
            *several((*layer.inputs, *layer.inner), self.layers),
            *kept_by_head(model, shape.targets),
        )
        return Activations(outside, ())

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def small(self, form: SmallObjective) -> "CondenserConfig":
        """Return the term for a model of fewer layers: it reads the middle one."""
        return self.model_copy(update={"early": None})

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse also an early layer that is none of the model's, or its last."""
        yield from super().refusals(setting)
        layers = setting.model.layers
        if self.early is not None and self.early >= layers:
            yield Refusal(
                ("objective", self.name, "early"),
                f"the head reads the states of layer {self.early}, but the model has {layers} layers, and the last "
                "one's states would show it what the vector is to hold",
                f"give 0 (the embeddings) to {layers - 1}, or null for {layers // 2}",
            )
