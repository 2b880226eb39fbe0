"""Small classes that several readers of settings share. They load nothing but pydantic, because pages and lists read
them, too."""

from dataclasses import dataclass

from pydantic import SerializerFunctionWrapHandler, model_serializer

from data_service.formats import StrictRecord
from launcher.runtime.recipe.document import Path


class Choice(StrictRecord):
    """A part with optional fields. Fields that are not given are left out of the YAML."""

    @model_serializer(mode="wrap")
    def _leave_out_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}


@dataclass(frozen=True)
class RecipeIssue:
    """A mistake in a recipe: `what` is wrong at `path`, and the `remedy`."""

    path: Path
    what: str
    remedy: str
