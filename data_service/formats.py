"""JSON that may not be what we write: from elsewhere, or from a newer version of Maskfleet. What such a version has
written is told from damage: it is refused, never passed over or deleted.

Everything that we write as JSON has a number, `format`, or is of format 1 where it has none. A version that means
something else by a field writes a higher number.
"""

import json
from typing import Any

from pydantic import ValidationError

REMEDY = "use that version of maskfleet, or a newer one; nothing was changed"


def foreign_json(data: bytes | str) -> Any:
    """What is in JSON that we did not write. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def newer(where: str) -> str:
    """What is wrong with such an object."""
    return f"{where} was written by a newer version of maskfleet"


def says_newer(content: object, known: int = 1) -> bool:
    """Whether parsed JSON has a `format` above `known`."""
    number = content.get("format") if isinstance(content, dict) else None
    return isinstance(number, int) and number > known


def is_newer(data: bytes, known: int, error: ValidationError | None = None) -> bool:
    """Whether intact JSON was written by a version of ours that knows more.

    Its `format` is a number above `known`; or it has fields that `error`, from reading it, says are unknown. The caller
    has compared `data` with its digest, where it has one.
    """
    try:
        content = foreign_json(data)
    except ValueError:
        return False
    if says_newer(content, known):
        return True
    unknown = error is not None and {found["type"] for found in error.errors()} == {"extra_forbidden"}
    return isinstance(content, dict) and unknown
