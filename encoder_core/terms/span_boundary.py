"""SpanBERT's objective (Joshi et al., 2020), as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.cost.activations import Activations, kept_by_decoder
from encoder_core.cost.flops import decoder
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Saved, norm
from encoder_core.cost.states import CountedStates
from encoder_core.layers.sizes import POSITION_WIDTH
from encoder_core.terms.term import HeadConfig, Refusal, Setting, without_mlm


class SboConfig(HeadConfig):
    """Span boundary objective: predicts masked spans from the two tokens around them (section 3.2).

    Costs assume that every target has a boundary. In fact, targets of spans at the ends of a row have none, nor have
    targets of a span from its sixteenth on.
    """

    name = "sbo"
    reads = "all"

    def products(self, states: CountedStates) -> Iterator[Product]:
        model, targets = states.model, states.shape.targets
        hidden, width = model.hidden, model.embedding_width
        yield Product("head: span boundary", targets, 2 * hidden + POSITION_WIDTH, hidden)
        yield Product("head: span boundary", targets, hidden, width)
        yield from decoder(width, model.vocabulary, targets)

    def keeps(self, states: CountedStates) -> Activations:
        model, targets = states.model, states.shape.targets
        hidden, width = model.hidden, model.embedding_width
        outside = (
            Saved("head: boundaries and places", targets * (2 * hidden + POSITION_WIDTH)),
            Saved("head: before activations, and between", targets * hidden, count=2),
            Saved("head: before activations, and between", targets * width),
            *norm(targets, hidden),
            *norm(targets, width),
            *kept_by_decoder(width, model.vocabulary, targets),
        )
        return Activations(outside, ())

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without masked spans."""
        yield from without_mlm(self.name, setting, "it predicts the tokens that mlm masks")
        if "mlm" in setting.terms and setting.rows is not None and setting.rows.unit != "span":
            yield Refusal(
                ("objective", "sbo"),
                f"the span boundary objective needs masked spans, but the unit of masks is {setting.rows.unit}",
                "set objective.mlm.unit to span, or leave sbo out",
            )
