"""Reads the lines of metrics segments into columns: one array per field, instead of one dict per step."""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data_service.formats import NEWER_REMEDY, has_newer_format, newer_version_message
from launcher.errors import RunError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Record = dict[str, Any]

_FIELD_PATTERN = re.compile(r"\w{1,100}", re.ASCII)  # names of fields that become columns
_MAX_FIELDS = 256  # limit of columns, since a damaged line could have a million fields


class NotARecord(ValueError):
    """A line is not a record. The message says why."""


@dataclass(frozen=True)
class StepTable:
    """The records in consecutive segments of one attempt: n step records and others.

    Attributes:
        segments: [n] int64, number of the segment that holds each step record; it never decreases.
        columns: [n] float64 for each field that is a number in any step record; NaN where it is not a number.
        others: evaluation records: (number of the segment, record).
        damage: messages about unreadable lines.
    """

    segments: Ints
    columns: dict[str, Floats]
    others: tuple[tuple[int, Record], ...]
    damage: tuple[str, ...]


class TableBuilder:
    """Builds a `StepTable` from segments, which must be added in order."""

    def __init__(self) -> None:
        self._segments = array("q")
        self._columns: dict[str, array[float]] = {}
        self._others: list[tuple[int, Record]] = []
        self._damage: list[str] = []

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, number: int, name: str, data: bytes, first_line: int = 1) -> list[bool]:
        """Add the lines `data` of segment `number`. Return for each line whether it is a step record.

        `name`: name of the segment in messages. `first_line`: line number of the first line in the segment.
        """
        steps = []
        for line, record in parse_records(name, data, first_line):
            steps.append(not isinstance(record, NotARecord) and record["kind"] == "step")
            if isinstance(record, NotARecord):
                self._damage.append(f"{name}, line {line}: {record}")
            elif steps[-1]:
                self._add_step(number, record)
            else:
                self._others.append((number, record))
        return steps

    def build(self) -> StepTable:
        rows = len(self._segments)
        for values in self._columns.values():
            _pad_with_nan(values, rows)
        columns = {name: np.array(values, dtype=np.float64) for name, values in self._columns.items()}
        return StepTable(np.array(self._segments, dtype=np.int64), columns, tuple(self._others), tuple(self._damage))

    def _add_step(self, number: int, record: Record) -> None:
        row = len(self._segments)
        self._segments.append(number)
        for name, value in record.items():
            if isinstance(value, int | float):
                values = self._columns.get(name)
                if values is None:
                    if len(self._columns) == _MAX_FIELDS or not _FIELD_PATTERN.fullmatch(name):
                        continue
                    values = self._columns[name] = array("d")
                _pad_with_nan(values, row)
                values.append(_as_float(value))


def parse_records(name: str, data: bytes, first_line: int = 1) -> Iterator[tuple[int, Record | NotARecord]]:
    """Yield each line's number, counted from `first_line`, and its record, or NotARecord if it is no record.

    `name`: name of the segment in messages. Raises RunError if a newer version wrote a record.
    """
    for number, line in enumerate(data.splitlines(), start=first_line):
        try:
            yield number, _parse_record(line, name)
        except NotARecord as problem:
            yield number, problem


def parse_line(line: bytes, name: str) -> Any:
    """Return the JSON value in a line of the segment `name`.

    Raises:
        ValueError, RecursionError: the line is not JSON.
        RunError: a newer version wrote it.
    """
    found = json.loads(line)
    if has_newer_format(found):
        raise RunError(newer_version_message(name), remedy=NEWER_REMEDY)
    return found


def _parse_record(line: bytes, name: str) -> Record:
    try:
        record = parse_line(line, name)
    except (ValueError, RecursionError) as error:
        raise NotARecord(f"not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("kind") not in ("step", "evaluation"):
        raise NotARecord("neither the record of a step nor that of an evaluation")
    if not isinstance(record.get("step"), int) or not 0 <= record["step"] < 2**53:
        raise NotARecord("no valid step number")
    return cast("Record", record)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def _pad_with_nan(values: "array[float]", rows: int) -> None:
    if len(values) < rows:
        values.extend([float("nan")] * (rows - len(values)))
