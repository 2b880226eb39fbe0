"""Parses the option `--corpus`, with which a command line names a corpus."""

import re
from dataclasses import dataclass

_NAMED_SOURCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class CorpusOption:
    """A value of `--corpus [NAME=]URI[@WEIGHT]`. Without NAME, the name is the last part of the URI."""

    name: str
    uri: str
    weight: float | None

    @classmethod
    def parse(cls, text: str) -> "CorpusOption":
        named = _NAMED_SOURCE.fullmatch(text)
        rest = named[2] if named else text
        uri, weight = rest, None
        before, at, after = rest.rpartition("@")
        if at and (number := _number(after)) is not None:
            uri, weight = before, number
        last = re.sub(r"[^A-Za-z0-9_-]+", "_", uri.rstrip("/").rpartition("/")[2]).strip("_")
        return cls(named[1] if named else last or "text", uri, weight)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
