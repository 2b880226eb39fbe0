"""Tells what a newer version of Maskfleet has written from damage: it is refused, never passed over or deleted."""

import json

from pydantic import ValidationError

REMEDY = "use that version of maskfleet, or a newer one; nothing was changed"


def is_newer(data: bytes, known: int, error: ValidationError | None = None) -> bool:
    """Whether intact JSON was written by a version of ours that knows more.

    Its `format` is a number above `known`; or it has fields that `error`, from reading it, says are unknown. The caller
    has compared `data` with its digest, where it has one.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    number = content.get("format", known)
    if isinstance(number, int) and number > known:
        return True
    return error is not None and {found["type"] for found in error.errors()} == {"extra_forbidden"}
