"""Lines of a metrics segment, read into columns: one array for each field of the steps, not a dict for each step."""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from data_service.formats import REMEDY, newer, says_newer
from launcher.errors import RunError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Record = dict[str, Any]

_FIELD = re.compile(r"\w{1,100}", re.ASCII)
_MOST_FIELDS = 256  # of steps; a damaged line must not make a million columns


class NotARecord(ValueError):
    """A line that cannot be used, and why."""


@dataclass(frozen=True)
class StepTable:
    """What some consecutive segments of one attempt hold.

    Attributes:
        segments: [n] of each of n step records, which segment it lies in; never falling.
        columns: [n] float64 by field, every field that is a number in some of the records; NaN where it is not.
        others: evaluation records, each after the number of its segment.
        damage: what could not be read, for people.
    """

    segments: Ints
    columns: dict[str, Floats]
    others: tuple[tuple[int, Record], ...]
    damage: tuple[str, ...]


class TableBuilder:
    """Takes segments in order."""

    def __init__(self) -> None:
        self._segments = array("q")
        self._columns: dict[str, array[float]] = {}
        self._others: list[tuple[int, Record]] = []
        self._damage: list[str] = []

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, number: int, name: str, data: bytes) -> None:
        """The segment `number`, `name` to people."""
        for line, record in parse(name, data):
            if isinstance(record, NotARecord):
                self._damage.append(f"{name}, line {line}: {record}")
            elif record["kind"] == "step":
                self._add_step(number, record)
            else:
                self._others.append((number, record))

    def build(self) -> StepTable:
        rows = len(self._segments)
        for values in self._columns.values():
            _pad(values, rows)
        columns = {name: np.array(values, dtype=np.float64) for name, values in self._columns.items()}
        return StepTable(
            np.array(self._segments, dtype=np.int64), columns, tuple(self._others), tuple(self._damage)
        )

    def _add_step(self, number: int, record: Record) -> None:
        row = len(self._segments)
        self._segments.append(number)
        for name, value in record.items():
            if isinstance(value, int | float):
                values = self._columns.get(name)
                if values is None:
                    if len(self._columns) == _MOST_FIELDS or not _FIELD.fullmatch(name):
                        continue
                    values = self._columns[name] = array("d")
                _pad(values, row)
                values.append(_as_float(value))


def parse(name: str, data: bytes) -> Iterator[tuple[int, Record | NotARecord]]:
    """The records of a segment by their line's number from 1, or what is wrong with a line. `name`: of the segment.

    Raises RunError if a newer version wrote one.
    """
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            yield number, _record(line, name)
        except NotARecord as problem:
            yield number, problem


def parse_line(line: bytes, name: str) -> Any:
    """Return what is in one line of the segment `name`. Raises ValueError, RecursionError: no JSON. RunError: a newer
    version wrote it."""
    found = json.loads(line)
    if says_newer(found):
        raise RunError(newer(name), remedy=REMEDY)
    return found


def _record(line: bytes, name: str) -> Record:
    try:
        record = parse_line(line, name)
    except (ValueError, RecursionError) as error:
        raise NotARecord(f"not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("kind") not in ("step", "evaluation"):
        raise NotARecord("neither a step nor an evaluation")
    if not isinstance(record.get("step"), int) or not 0 <= record["step"] < 2**53:
        raise NotARecord("without the number of its step")
    return cast("Record", record)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def _pad(values: "array[float]", rows: int) -> None:
    if len(values) < rows:
        values.extend([float("nan")] * (rows - len(values)))
