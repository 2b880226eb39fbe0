"""The result of a measure: numbers, each with a description of what it measures."""

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

Form = Literal["raw", "whitened"]
"""Vectors as the encoder gives them, or whitened."""

ANISOTROPY = (
    "A diagnosis, not an objective. Normalising vectors does not cure anisotropy: a cosine ignores how long they are. "
    "Whitening does, fitted here on other texts than those measured. Less isotropy can serve a task better. IsoScore "
    "is 0 for a line and 1 for equal variance in all directions; the effective rank counts directions."
)
"""What has to be said with those figures."""


class Figure(BaseModel):
    """One number. What does not apply is None.

    Attributes:
        measure: what it is: `cosine`, `spearman`, `accuracy`, `mlm_loss`, ...
        value: None if it is no finite number.
        layer: 0 for the embeddings, L for the last layer's output; None for all together, or where it does not apply.
        pooling: how a text's hidden states became one vector.
        form: of the vectors.
        length: most tokens in the rows that it was measured on.
        source: the recipe's name of the corpus.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measure: str
    value: float | None
    layer: int | None = None
    pooling: str | None = None
    form: Form | None = None
    length: int | None = None
    source: str | None = None

    @field_validator("value")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @property
    def of(self) -> tuple[object, ...]:
        """What it is of: equal for figures of different checkpoints that can be compared."""
        return (self.measure, self.layer, self.pooling, self.form, self.length, self.source)


def named(figures: Iterable[Figure], measure: str) -> list[Figure]:
    """The figures of one measure, in order."""
    return [figure for figure in figures if figure.measure == measure]
