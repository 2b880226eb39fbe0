"""Small classes that several readers of settings share, and the sources of a phase (`phases.N.mixture`). They are not
in the recipe's schema because the schema loads torch."""

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
    """A part with optional fields. Fields that are not given are left out of the YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}


@dataclass(frozen=True)
class RecipeIssue:
    """A mistake in a recipe: `what` is wrong at `path`, and the `remedy`."""

    path: Path
    what: str
    remedy: str


class PhaseMixture(Choice):
    """The sources that a phase reads, and their shares.

    If any phase of a recipe has a mixture, a phase continues each source where the phase before it stopped, and no text
    is repeated before the whole source has been read (`data_service.stream.stages`).

    Attributes:
        weights: shares of the text's tokens, by source; a source that is not named is not read in this phase. None: the
            weights of the corpus.
        most_readings: largest number of times that a source of this phase may have been read by the phase's end, since
            the run began. A recipe that would read it more often is refused, so that shares always hold.
        steps: number of steps for which the phase's data are planned. None: the steps of the phase. A fork that makes a
            phase shorter or longer sets the former number, so that the phase continues in the same data.
    """

    weights: Annotated[dict[str, NonNegativeFloat], Field(min_length=1)] | None = None
    most_readings: Annotated[float, Field(gt=0)] | None = None
    steps: PositiveInt | None = None
