"""Parses the JSON of records, also with integers of thousands of digits, for which Python's parser refuses a record."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LongInteger:
    """Stands for an integer with more digits than Python converts (4,300). It is not valid as text, id or number."""


def parse_json_value(text: str | bytes) -> object:
    """Return a JSON value, with a `LongInteger` in place of each integer that is too long.

    Raises:
        ValueError: `text` is not JSON, or its bytes are not UTF-8, UTF-16 or UTF-32.
        RecursionError: its lists or objects are nested too deep.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_parse_integer)


def _parse_integer(digits: str) -> int | LongInteger:
    try:
        return int(digits)
    except ValueError:
        return LongInteger()
