"""Reads JSON that Maskfleet did not write, and recognises JSON that a newer version of Maskfleet has written. Also the
base of the classes whose objects we store as JSON.

Files of a newer version are distinguished from damaged ones: they are refused, never ignored or deleted. All our JSON
has a number `format`; without one it is of format 1. A version that changes the meaning of a field writes a higher
number.
"""

import hashlib
import json
import re
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

_ENVELOPE_PATTERN = re.compile(
    rb'\{"format":"([a-z-]+)","version":(\d+),"sha256":"([0-9a-f]{64})","content":(.*)\}\n', re.DOTALL
)
NEWER_REMEDY = "use that version of maskfleet, or a newer one; nothing was changed"


class StrictRecord(BaseModel):
    """Base class of settings and records. Instances cannot be changed, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GrowingRecord(StrictRecord):
    """A `StrictRecord` whose JSON leaves out `later_fields` that have their defaults, so that records from before these
    fields were added keep their JSON, and with it their fingerprint."""

    later_fields: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields = type(self).model_fields
        unset = {name for name in self.later_fields if getattr(self, name) == fields[name].default}
        return {name: value for name, value in serialize(self).items() if name not in unset}


def parse_json(data: bytes | str) -> Any:
    """Return the content of JSON that we did not write. Raises ValueError: it is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def newer_version_message(where: str) -> str:
    """Return the message for an object at `where` that a newer version has written."""
    return f"{where} was written by a newer version of maskfleet"


def has_newer_format(content: object, known: int = 1) -> bool:
    """Return whether parsed JSON has a `format` above `known`."""
    number = content.get("format") if isinstance(content, dict) else None
    return isinstance(number, int) and number > known


def is_from_newer_version(data: bytes, known: int, error: ValidationError | None = None) -> bool:
    """Return whether a newer version of Maskfleet wrote the intact JSON `data`.

    It did if `format` is above `known`, or if the only fault in `error`, which parsing it raised, is unknown fields.
    The caller has already compared `data` with its digest, if it has one.
    """
    try:
        content = parse_json(data)
    except ValueError:
        return False
    if has_newer_format(content, known):
        return True
    unknown = error is not None and {found["type"] for found in error.errors()} == {"extra_forbidden"}
    return isinstance(content, dict) and unknown


class Envelope(NamedTuple):
    """Content of a file, with its version. `digest`: sha256 (hex) of the exact bytes of `body`, so a flipped byte is
    found even if the JSON can still be parsed."""

    version: int
    digest: str
    body: bytes


def wrap_in_envelope(kind: str, version: int, body: bytes) -> bytes:
    """Return the bytes of a file of this kind, such as `maskfleet-corpus`. `body`: its content, as JSON."""
    head = f'{{"format":"{kind}","version":{version},"sha256":"{hashlib.sha256(body).hexdigest()}","content":'
    return head.encode() + body + b"}\n"


def open_envelope(kind: str, data: bytes) -> Envelope:
    """Return the content that `wrap_in_envelope` packed. Raises ValueError: `data` is damaged or of another kind."""
    found = _ENVELOPE_PATTERN.fullmatch(data)
    if found is None or found[1] != kind.encode():
        raise ValueError(f"its beginning or end is not that of a file of format {kind}")
    if hashlib.sha256(found[4]).hexdigest() != found[3].decode():
        raise ValueError("its bytes do not match its own hash")
    return Envelope(int(found[2]), found[3].decode(), found[4])
