"""Bad records that were skipped: receipts keep the first of them, and the user sees them with file and line."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from data_service.ingest.files import open_text
from data_service.ingest.inputs import InputFile
from data_service.ingest.records import BadRecord, PlaceUnit

MAX_LISTED_RECORDS = 100
_READ_CHUNK_BYTES = 1 << 20


class SkippedRecord(BaseModel):
    """A bad record that was skipped. `number` counts `unit`s in the file at `uri`, as in `RecordPlace`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    unit: PlaceUnit
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.uri}{f', {self.unit} {self.number}' if self.unit else ''}: {self.reason}"


def skipped_record(bad: BadRecord) -> SkippedRecord:
    """Return the entry that a receipt keeps of a bad record. The record's file is not read."""
    place = bad.place
    return SkippedRecord(uri=place.file.uri, unit=place.unit, number=place.number, reason=bad.reason)


def with_line_numbers(records: Sequence[SkippedRecord], files: Iterable[InputFile]) -> list[SkippedRecord]:
    """Return the records with line numbers instead of byte positions. Each file is read once, up to its last record.

    Raises:
        InputError, StoreError: as `open_text`.
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


def _line_numbers(file: InputFile, offsets: Iterable[int]) -> dict[int, int]:
    """Return the number of the line, from 1, that holds each byte."""
    lines: dict[int, int] = {}
    position, line = 0, 1
    with open_text(file) as stream:
        for offset in sorted(set(offsets)):
            while position < offset and (data := stream.read(min(_READ_CHUNK_BYTES, offset - position))):
                position += len(data)
                line += data.count(b"\n")
            lines[offset] = line
    return lines
