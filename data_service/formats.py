"""Tells what a newer version of Maskfleet has written from damage: it is refused, never passed over or deleted.

Everything that we write as JSON has a number, `format`, or is of format 1 where it has none. A version that means
something else by a field writes a higher number.
"""

import json

from pydantic import ValidationError

REMEDY = "use that version of maskfleet, or a newer one; nothing was changed"


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
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if says_newer(content, known):
        return True
    unknown = error is not None and {found["type"] for found in error.errors()} == {"extra_forbidden"}
    return isinstance(content, dict) and unknown
