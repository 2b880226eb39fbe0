"""The keys that a recipe may have, read from its schema."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from launcher.recipe.schema import Recipe


def keys_of(kind: Any, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted paths of every field below an annotation; list items and names of one's own are `*`."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        for name, field in kind.model_fields.items():
            below = f"{path}.{name}" if path else name
            yield below, field
            yield from keys_of(field.annotation, below)
    elif origin in (tuple, list):
        yield from keys_of(inner[0], f"{path}.*")
    elif origin is dict:
        yield from keys_of(inner[1], f"{path}.*")
    elif origin is Annotated:
        yield from keys_of(inner[0], path)
    else:
        for one in inner:
            yield from keys_of(one, path)


def schema() -> dict[str, list[FieldInfo]]:
    """Dotted path -> the fields that it may be, one for each family or packing that has it."""
    found: dict[str, list[FieldInfo]] = {}
    for path, field in keys_of(Recipe):
        found.setdefault(path, []).append(field)
    return found
