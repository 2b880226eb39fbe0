"""The figures (metrics) of loss terms: each is a ratio of two sums of a term, with a name and a unit for displays.

`encoder_core.train.metrics` computes them. This file does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TermFigure:
    """The ratio of two sums of a term, recorded as `<term>_<name>` for every term that has both sums.

    Attributes:
        part, whole: names of the two sums; the figure is part / whole.
        unit: unit for displays.
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
        """Return the title, such as `MLM accuracy`, of the figure recorded as `field`."""
        term = field.removesuffix(self.suffix).replace("_", " ").upper()
        return f"{term} {self.name.replace('_', ' ')}"


TERM_LOSS = TermFigure("loss", "loss", "nats per target")
AVERAGE_PREFIX = "average_"
"""Prefix of the figures of held-out rows that are computed with the average of the weights."""
DETECTION_FIGURES = (
    TermFigure("precision", "found", "of the tokens called replaced", whole="flagged", share=True),
    TermFigure("recall", "found", "of the tokens replaced", whole="replaced", share=True),
    # 1 minus this figure is the accuracy of a discriminator that classifies no token as replaced.
    TermFigure("replaced", "replaced", "share of all tokens", share=True),
)
DIFFUSION_FIGURES = (
    TermFigure("bits", "bits", "per token, upper bound"),  # the loss (mean over all tokens) in bits
    TermFigure("hidden_accuracy", "filled", "share of hidden tokens", whole="hidden", share=True),
)
# If the negative similarity approaches the positive one, all vectors collapse to one.
CONTRASTIVE_FIGURES = (
    TermFigure("positive_similarity", "positive", "mean over queries"),
    TermFigure("negative_similarity", "negative", "mean over queries"),
)
TERM_FIGURES = (
    TermFigure("accuracy", "correct", "share of targets", share=True),
    *DETECTION_FIGURES,
    *DIFFUSION_FIGURES,
    *CONTRASTIVE_FIGURES,
)
"""All figures of terms, except the loss."""
