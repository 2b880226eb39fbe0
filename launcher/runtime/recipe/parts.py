"""Small parts that several readers of settings share. They are not in the recipe's schema because that loads torch."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

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
