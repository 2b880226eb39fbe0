"""Small parts that several readers of settings share, and the sources of a phase (`phases.N.mixture`). They are not
in the recipe's schema because that loads torch."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from launcher.runtime.recipe.document import Path


class Choice(BaseModel):
    """Optional fields of which some are given; those that are not stay out of the YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}


@dataclass(frozen=True)
class RecipeIssue:
    """What is wrong at `path`, and what to do about it."""

    path: Path
    what: str
    remedy: str


class PhaseMixture(Choice):
    """What a phase reads of the sources. If any phase of a recipe has one, each source is read on from phase to phase,
    and nothing of it comes again before all of it has come (`data_service.stream.stages`).

    Attributes:
        weights: shares of tokens of text by source; a source that is not named is not read in this phase. None: those
            of the corpus.
        most_readings: how often any source that the phase reads may have been read by its end, since the run began. A
            recipe that would read it more often is refused: what it says about shares always holds.
        steps: that the data of the phase are planned for, if not those that it has: of a phase that a fork has made
            shorter or longer, those that it had, so that it goes on in the same data.
    """

    weights: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)] | None = None
    most_readings: Annotated[float, Field(gt=0)] | None = None
    steps: PositiveInt | None = None
