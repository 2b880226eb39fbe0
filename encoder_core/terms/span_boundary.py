"""SpanBERT's objective (Joshi et al., 2020), as a recipe describes it."""

from collections.abc import Iterator

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import MAX_SPAN_TARGETS, SPAN_POSITION_WIDTH, linear_weights, norm_weights
from encoder_core.terms.term import HeadConfig, Refusal, Setting, require_mlm


class SboConfig(HeadConfig):
    """Span boundary objective: predicts masked spans from the two tokens around them (section 3.2).

    Costs assume that every target has a boundary. In fact, targets of spans at the ends of a row have none, nor have
    targets of a span from its sixteenth on.
    """

    name = "sbo"
    reads = "all"

    def weights(self, model: ModelConfig) -> int:
        hidden, width = model.hidden, model.embedding_width
        first = linear_weights(2 * hidden + SPAN_POSITION_WIDTH, hidden) + norm_weights(hidden)
        second = linear_weights(hidden, width) + norm_weights(width) + model.vocabulary
        return MAX_SPAN_TARGETS * SPAN_POSITION_WIDTH + first + second

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without masked spans."""
        yield from require_mlm(self.name, setting, "it predicts the tokens that mlm masks")
        if "mlm" in setting.terms and setting.rows is not None and setting.rows.unit != "span":
            yield Refusal(
                ("objective", "sbo"),
                f"the span boundary objective needs masked spans, but the unit of masks is {setting.rows.unit}",
                "set objective.mlm.unit to span, or leave sbo out",
            )
