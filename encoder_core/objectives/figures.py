"""The figures of loss terms. Each is declared here once: from which two sums of a term it is made, and how displays
name it. `encoder_core.train.metrics` makes the figures of these rows, and every display reads them; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TermFigure:
    """A figure of each term that has its sums, recorded as `<term>_<name>`: the ratio of two sums.

    Attributes:
        part, whole: names of the sums.
        unit: unit of the curve.
        share: whether the figure lies between 0 and 1.
    """

    name: str
    part: str
    unit: str
    whole: str = "targets"
    share: bool = False

    @property
    def suffix(self) -> str:
        return f"_{self.name}"

    def title(self, field: str) -> str:
        """Return the title of a field that holds this figure, such as `MLM accuracy`."""
        term = field.removesuffix(self.suffix).replace("_", " ").upper()
        return f"{term} {self.name.replace('_', ' ')}"


TERM_LOSS = TermFigure("loss", "loss", "nats per target")
AVERAGE_PREFIX = "average_"
"""Prefix of the figures of held-out rows that the average of the weights gives."""
DETECTION_FIGURES = (
    TermFigure("precision", "found", "of the tokens called replaced", whole="flagged", share=True),
    TermFigure("recall", "found", "of the tokens replaced", whole="replaced", share=True),
    # One minus it is the accuracy of flagging none.
    TermFigure("replaced", "replaced", "share of tokens that were", share=True),
)
DIFFUSION_FIGURES = (
    TermFigure("bits", "bits", "bound of the text's, per token"),  # the loss, a mean over all tokens, in bits
    TermFigure("hidden_accuracy", "filled", "share of hidden tokens", whole="hidden", share=True),
)
# If the second approaches the first, all vectors collapse to one.
CONTRASTIVE_FIGURES = (
    TermFigure("positive_similarity", "positive", "mean of queries"),
    TermFigure("negative_similarity", "negative", "mean of queries"),
)
TERM_FIGURES = (
    TermFigure("accuracy", "correct", "share of targets", share=True),
    *DETECTION_FIGURES,
    *DIFFUSION_FIGURES,
    *CONTRASTIVE_FIGURES,
)
"""The figures of terms, besides their loss."""
