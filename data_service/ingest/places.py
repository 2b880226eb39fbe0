"""The places of records in their files, and the list of skipped bad records, by file and line."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from data_service.ingest.files import open_text
from data_service.ingest.inputs import InputFile

MAX_LISTED_RECORDS = 100  # skipped records that a receipt or a manifest lists
_READ_CHUNK_BYTES = 1 << 20

PlaceUnit = Literal["", "byte", "line", "row", "record"]  # what `RecordPlace.number` counts


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The place of a record, or of a whole file.

    `number` counts in `unit`: lines from 1, rows and records from 0, or the byte, from 0, at which a record begins. A
    record that is a whole file has no unit.
    """

    file: InputFile
    unit: PlaceUnit = ""
    number: int = 0

    def __str__(self) -> str:
        return _format_place(self.file.uri, self.unit, self.number)


class LinePlace(RecordPlace):
    """The place of a record by the first byte of its line. Lines are counted only when a message needs the number."""

    def __str__(self) -> str:
        return _format_place(self.file.uri, "line", _line_numbers(self.file, [self.number])[self.number])


class SkippedRecord(BaseModel):
    """A bad record that was skipped. `number` counts `unit`s in the file at `uri`, as in `RecordPlace`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    unit: PlaceUnit
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{_format_place(self.uri, self.unit, self.number)}: {self.reason}"


def with_line_numbers(records: Sequence[SkippedRecord], files: Iterable[InputFile]) -> list[SkippedRecord]:
    """Return the records with line numbers instead of byte offsets. Each file is read once, up to its last record.

    Raises:
        InputError, StoreError: as in `open_text`.
    """
    by_uri: dict[str, list[int]] = {}
    for record in records:
        if record.unit == "byte":
            by_uri.setdefault(record.uri, []).append(record.number)
    lines = {file.uri: _line_numbers(file, by_uri[file.uri]) for file in files if file.uri in by_uri}
    return [
        record.model_copy(update={"unit": "line", "number": lines[record.uri][record.number]})
        if record.uri in lines and record.unit == "byte"
        else record
        for record in records
    ]


def _format_place(uri: str, unit: PlaceUnit, number: int) -> str:
    return f"{uri}, {unit} {number}" if unit else uri


def _line_numbers(file: InputFile, offsets: Iterable[int]) -> dict[int, int]:
    """Return the number of the line, from 1, that holds each byte offset."""
    lines: dict[int, int] = {}
    position, line = 0, 1
    with open_text(file) as stream:
        for offset in sorted(set(offsets)):
            while position < offset and (data := stream.read(min(_READ_CHUNK_BYTES, offset - position))):
                position += len(data)
                line += data.count(b"\n")
            lines[offset] = line
    return lines
