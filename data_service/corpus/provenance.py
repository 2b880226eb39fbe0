"""The provenance of a document: id, source, URL, licence, language and date; and the input fields that hold them.

Training never reads provenance: it is stored in files next to the shards (`sidecar.py`).
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
ValuePatterns = Annotated[tuple[str, ...], Field(min_length=1)]  # allowed values of a field; see matches_any_pattern
_OPTIONAL_TEXT_FIELD = Field(default=None, min_length=1)


def matches_any_pattern(value: str | None, patterns: Sequence[str]) -> bool:
    """Return whether a value matches one of the patterns. `*` matches any text; case is ignored."""
    if value is None:
        return False
    expressions = (".*".join(map(re.escape, one.lower().split("*"))) for one in patterns)
    return any(re.fullmatch(one, value.lower(), re.DOTALL) for one in expressions)


class Provenance(NamedTuple):
    """The provenance of one document. None: the field is not recorded, or is optional and absent for the document."""

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
    """The cluster of near duplicates in which `corpus prepare` found a document. `found`: digest of all clusters of the
    preparation; `name`: id of the cluster's first document, None if the document has no near duplicate."""

    found: str
    name: str | None


class InputConstants(StrictRecord):
    """Default values for documents of the files whose URIs match the pattern `inputs`.

    There is no default id, because an id names a single document.
    """

    inputs: str = "*"
    source: str | None = _OPTIONAL_TEXT_FIELD
    url: str | None = _OPTIONAL_TEXT_FIELD
    licence: str | None = _OPTIONAL_TEXT_FIELD
    language: str | None = _OPTIONAL_TEXT_FIELD
    date: str | None = _OPTIONAL_TEXT_FIELD


class ProvenanceOptions(StrictRecord):
    """Settings that say which fields of a record, or columns of a table, hold a document's provenance.

    Attributes:
        id, source, url, licence, language, date: name of the record's field that holds it.
        constants: default values for whole input files, for records without a value. The first that matches is used.
        may_lack: provenance fields that are optional. A record without one of the other recorded fields is bad.
        only: allowed values by field, as patterns such as `{licence: [mit, cc-by-*]}`. Documents with another value,
            or without one, are left out.
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
                f"no provenance is recorded: name a field or a constant for one of {', '.join(PROVENANCE_FIELDS)}"
            )
        other = [field for field in self.may_lack if field not in self.recorded_fields]
        if other:
            raise ValueError(f"may_lack: {', '.join(other)} is not recorded: name its field or drop it from may_lack")
        if other := [field for field in self.only if field not in self.recorded_fields]:
            raise ValueError(f"only: {', '.join(other)} is not recorded: name its field, or a constant")
        return self

    @property
    def recorded_fields(self) -> tuple[ProvenanceField, ...]:
        """The provenance fields that are recorded for every document."""
        return tuple(
            field
            for field in PROVENANCE_FIELDS
            if getattr(self, field) is not None or any(getattr(one, field, None) for one in self.constants)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the record's fields (or the table's columns) that are read."""
        names = (getattr(self, field) for field in PROVENANCE_FIELDS)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def unmatched_patterns(self, uris: list[str]) -> list[str]:
        """Return the patterns in `constants` that match no input URI."""
        return [one.inputs for one in self.constants if not any(fnmatchcase(uri, one.inputs) for uri in uris)]

    def is_selected(self, provenance: Provenance) -> bool:
        """Return whether `only` allows a document with this provenance."""
        return all(matches_any_pattern(getattr(provenance, field), patterns) for field, patterns in self.only.items())

    def read_provenance(self, record: Mapping[str, object], uri: str) -> Provenance:
        """Return the provenance of the document in a record of the file at `uri`.

        Raises:
            ValueError: the record lacks a field that is not in `may_lack`, or a value is not text.
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
    """Return a field's value as text; None if missing or blank. Raises ValueError: neither text nor integer."""
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
