"""Settings of a phase for its sources and masks (`phases.N.mixture`, `phases.N.mlm`)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from data_service.samples.masking import MaskingUnit
from data_service.samples.replacement import Replacement
from data_service.samples.spec import SourceWeight
from launcher.runtime.recipe.parts import SparseRecord

MaskRate = Annotated[float, Field(gt=0, le=0.8)]  # share of masked tokens


class ChangingRate(SparseRecord):
    """A share of masked tokens that changes linearly from `start` to `end` over the rows that are planned for a phase
    (Ankner et al. 2023, arXiv 2305.15096)."""

    start: MaskRate
    end: MaskRate


class PhaseMlm(SparseRecord):
    """Masks of a phase that differ from those of the objective.

    Attributes:
        rate: share of the tokens that are masked: one for the phase, or one that changes within it.
        unit: unit that is masked as a whole.
        replace: what replaces masked tokens.
    """

    rate: MaskRate | ChangingRate | None = None
    unit: MaskingUnit | None = None
    replace: Replacement | None = None

    @property
    def highest_rate(self) -> float | None:
        """The highest share of masked tokens in the phase; None if the phase sets none."""
        return max(self.rate.start, self.rate.end) if isinstance(self.rate, ChangingRate) else self.rate


def _refuse_exponent(temperature: float) -> float:
    if temperature < 1:
        raise ValueError(
            f"size ** (1 / T) needs a T of 1 or more; a published exponent of {temperature:g} is T = "
            f"{1 / temperature:.6g}"
        )
    return temperature


Temperature = Annotated[float, Field(gt=0), AfterValidator(_refuse_exponent)]
"""T; sources without weights are drawn in proportion to size ** (1 / T)."""


class PhaseMixture(SparseRecord):
    """The sources that a phase reads, and their shares.

    If any phase of a recipe has a mixture, a phase continues each source where the phase before it stopped, and no text
    is repeated before the whole source has been read (`data_service.stream.stages`).

    Attributes:
        weights: shares of the text's tokens, by source; a source that is not named is not read in this phase. Sources
            with `auto` divide the remainder to 1 by their sizes; the other weights are then fractions of 1. None: the
            weights of the corpus.
        temperature: temperature by which sources with auto divide the remainder. None: the recipe's.
        most_readings: largest number of times that a source of this phase may have been read by the phase's end, since
            the run began. A recipe that would read it more often is refused, so that shares always hold.
        steps: number of steps for which the phase's data are planned. None: the steps of the phase. A fork that makes a
            phase shorter or longer sets the former number, so that the phase continues in the same data.
    """

    weights: Annotated[dict[str, SourceWeight | Literal["auto"]], Field(min_length=1)] | None = None
    temperature: Temperature | None = None
    most_readings: Annotated[float, Field(gt=0)] | None = None
    steps: PositiveInt | None = None
