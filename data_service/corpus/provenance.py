"""What is known of a document besides its text: id, source, URL, licence, language and date, and which fields of an
input say so. Training never reads it: it lies next to the shards (`sidecar.py`).
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from data_service.formats import StrictRecord

ProvenanceField = Literal["id", "source", "url", "licence", "language", "date"]
PROVENANCE_FIELDS: tuple[ProvenanceField, ...] = get_args(ProvenanceField)

MISSING_FIELD_REMEDY = (
    "correct the record; or, in the file of --provenance, name the right field, give a constant for the input, or let "
    "documents lack it (may_lack)"
)
ValuePatterns = Annotated[tuple[str, ...], Field(min_length=1)]
_OPTIONAL_TEXT_FIELD = Field(default=None, min_length=1)


def matches_any_pattern(value: str | None, patterns: Sequence[str]) -> bool:
    """Return whether a value matches one of the patterns. `*` stands for any text; case makes no difference."""
    if value is None:
        return False
    expressions = (".*".join(map(re.escape, one.lower().split("*"))) for one in patterns)
    return any(re.fullmatch(one, value.lower(), re.DOTALL) for one in expressions)


class Provenance(NamedTuple):
    """What is known of a document. None: not recorded, or the record lacks it and may lack it."""

    id: str | None = None
    source: str | None = None
    url: str | None = None
    licence: str | None = None
    language: str | None = None
    date: str | None = None

    @property
    def description(self) -> str:
        """The known fields as text for people, such as `id 17, licence MIT`."""
        known = zip(PROVENANCE_FIELDS, self, strict=True)
        return ", ".join(f"{name} {value}" for name, value in known if value is not None)


class DuplicateCluster(NamedTuple):
    """The cluster of near duplicates in which `prepare` found a document. `found`: digest of all clusters of the
    preparation; `name`: id of the cluster's first document, None if the document is alone."""

    found: str
    name: str | None


class InputConstants(StrictRecord):
    """Values for all documents of the files whose URIs match the pattern `inputs`, which lack them otherwise.

    There is none for an id, which is never the same for several documents.
    """

    inputs: str = "*"
    source: str | None = _OPTIONAL_TEXT_FIELD
    url: str | None = _OPTIONAL_TEXT_FIELD
    licence: str | None = _OPTIONAL_TEXT_FIELD
    language: str | None = _OPTIONAL_TEXT_FIELD
    date: str | None = _OPTIONAL_TEXT_FIELD


class ProvenanceOptions(StrictRecord):
    """The fields of a record, or columns of a table, that say what is known of a document.

    Attributes:
        id, source, url, licence, language, date: name of the field of the record that holds it.
        constants: values for whole inputs, in place of what a record lacks. The first whose pattern matches counts.
        may_lack: what a document may lack. A record that lacks anything else that is recorded is bad.
        only: patterns of which a value must match one, such as `{licence: [mit, cc-by-*]}`. Other documents are left
            out, those that lack the value, too.
    """

    id: str | None = _OPTIONAL_TEXT_FIELD
    source: str | None = _OPTIONAL_TEXT_FIELD
    url: str | None = _OPTIONAL_TEXT_FIELD
    licence: str | None = _OPTIONAL_TEXT_FIELD
    language: str | None = _OPTIONAL_TEXT_FIELD
    date: str | None = _OPTIONAL_TEXT_FIELD
    constants: tuple[InputConstants, ...] = ()
    may_lack: tuple[ProvenanceField, ...] = ()
    only: dict[ProvenanceField, ValuePatterns] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_recorded_fields(self) -> Self:
        if not self.recorded_fields:
            raise ValueError(
                f"nothing is recorded: name a field or a constant for one of {', '.join(PROVENANCE_FIELDS)}"
            )
        other = [field for field in self.may_lack if field not in self.recorded_fields]
        if other:
            raise ValueError(f"may_lack: {', '.join(other)} is not recorded: name its field or leave it out")
        if other := [field for field in self.only if field not in self.recorded_fields]:
            raise ValueError(f"only: {', '.join(other)} is not recorded: name its field or a constant for it")
        return self

    @property
    def recorded_fields(self) -> tuple[ProvenanceField, ...]:
        """What is recorded of every document."""
        return tuple(
            field
            for field in PROVENANCE_FIELDS
            if getattr(self, field) is not None or any(getattr(one, field, None) for one in self.constants)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the fields of a record that are read."""
        names = (getattr(self, field) for field in PROVENANCE_FIELDS)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def unmatched_patterns(self, uris: list[str]) -> list[str]:
        """Return the patterns of constants that match none of the inputs' URIs."""
        return [one.inputs for one in self.constants if not any(fnmatchcase(uri, one.inputs) for uri in uris)]

    def is_selected(self, provenance: Provenance) -> bool:
        """Return whether `only` chooses a document of which this is known."""
        return all(matches_any_pattern(getattr(provenance, field), patterns) for field, patterns in self.only.items())

    def read_provenance(self, record: Mapping[str, object], uri: str) -> Provenance:
        """Return what the record of the file at `uri` says of its document.

        Raises:
            ValueError: the record lacks something that it may not lack, or a value is not text.
        """
        constants = [one for one in self.constants if fnmatchcase(uri, one.inputs)]
        found: dict[str, str | None] = {}
        for field in self.recorded_fields:
            name: str | None = getattr(self, field)
            value = None if name is None else _field_text(record.get(name), name)
            if value is None:
                value = next((there for one in constants if (there := getattr(one, field, None))), None)
            if value is None and field not in self.may_lack:
                raise ValueError(_missing_field_text(field, name, record))
            found[field] = value
        return Provenance(**found)


def _missing_field_text(field: str, name: str | None, record: Mapping[str, object]) -> str:
    if name is None:
        return f"no {field}: no constant is given for this file"
    there = "is empty" if name in record else f"is missing (there are {', '.join(map(repr, record)) or 'no fields'})"
    return f"no {field}: field {name!r} {there}"


def _field_text(value: object, name: str) -> str | None:
    """Return a field's value as text; None if it is empty."""
    match value:
        case None:
            return None
        case bytes():
            try:
                text = value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"field {name!r} is not UTF-8 (at byte {error.start})") from error
        case str():
            text = value
        case int() if not isinstance(value, bool):
            text = str(value)
        case _:
            raise ValueError(f"field {name!r} is {type(value).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {name!r} holds half a surrogate pair, which is not text") from error
    return text if text.strip() else None
