"""Reads JSON that Maskfleet did not write, and recognises JSON that a newer version of Maskfleet has written.

Files of a newer version are distinguished from damaged ones: they are refused, never ignored or deleted. All our JSON
has a number `format`; without one it is of format 1. A version that changes the meaning of a field writes a higher
number.
"""

import json
from typing import Any

from pydantic import ValidationError

REMEDY = "use that version of maskfleet, or a newer one; nothing was changed"


def foreign_json(data: bytes | str) -> Any:
    """Return the content of JSON that we did not write. Raises ValueError: it is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def newer(where: str) -> str:
    """Return the message for an object at `where` that a newer version has written."""
    return f"{where} was written by a newer version of maskfleet"


def says_newer(content: object, known: int = 1) -> bool:
    """Return whether parsed JSON has a `format` above `known`."""
    number = content.get("format") if isinstance(content, dict) else None
    return isinstance(number, int) and number > known


def is_newer(data: bytes, known: int, error: ValidationError | None = None) -> bool:
    """Return whether a newer version of Maskfleet wrote the intact JSON `data`.

    It did if `format` is above `known`, or if the only fault in `error`, which parsing it raised, is unknown fields.
    The caller has already compared `data` with its digest, if it has one.
    """
    try:
        content = foreign_json(data)
    except ValueError:
        return False
    if says_newer(content, known):
        return True
    unknown = error is not None and {found["type"] for found in error.errors()} == {"extra_forbidden"}
    return isinstance(content, dict) and unknown
