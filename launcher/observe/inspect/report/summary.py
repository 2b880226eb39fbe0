"""Step records in bounded memory: what charts and totals need of a run, however many steps it has.

Steps are put into bins of equal width. Of each field a bin keeps sum, count, smallest and largest value. When there are
too many bins, the width doubles and neighbours become one, so sums, counts and extremes stay exact. Records can be
added at the end; a run that goes back is summed up anew.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from launcher.runtime.run.history import StepHistory
from launcher.runtime.run.metrics import STEP, Metric, is_summed

Floats = NDArray[np.float64]
Axis = Literal["steps", "tokens", "hours"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "hours")

_MOST_BINS = 2000


@dataclass(frozen=True)
class _Column:
    """Of one field, for each of m bins: [m] float64 each."""

    sums: Floats
    counts: Floats
    lows: Floats
    highs: Floats

    @classmethod
    def of(cls, values: Floats) -> "_Column":
        """Return a bin for each value; one that is no number counts for nothing."""
        known = np.isfinite(values)
        return cls(
            np.where(known, values, 0.0),
            known.astype(np.float64),
            np.where(known, values, np.inf),
            np.where(known, values, -np.inf),
        )

    @classmethod
    def nothing(cls, bins: int) -> "_Column":
        return cls.of(np.full(bins, np.nan))

    def joined(self, starts: NDArray[np.int64]) -> "_Column":
        """Bins from each of `starts` to the next become one."""
        return _Column(
            np.add.reduceat(self.sums, starts),
            np.add.reduceat(self.counts, starts),
            np.minimum.reduceat(self.lows, starts),
            np.maximum.reduceat(self.highs, starts),
        )

    def followed_by(self, other: "_Column") -> "_Column":
        return _Column(
            np.concatenate([self.sums, other.sums]),
            np.concatenate([self.counts, other.counts]),
            np.concatenate([self.lows, other.lows]),
            np.concatenate([self.highs, other.highs]),
        )


@dataclass(frozen=True)
class Curve:
    """A field along an axis: [n] float64 each, x rising; `low` and `high` are the extremes around each mean `y`."""

    x: Floats
    y: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Summary:
    """Of n step records, steps strictly increasing. Never changed: `and_then` makes another one.

    Attributes:
        first, last: [m] number of the first and of the last step in each of m bins.
        records: n.
        tokens_before: trained on before the first record: those of the runs that a fork comes from.
    """

    first: Floats
    last: Floats
    records: int
    tokens_before: float
    _columns: dict[str, _Column]
    _width: float

    @classmethod
    def of(cls, steps: StepHistory, tokens_before: float = 0.0) -> "Summary":
        """Reads one column after the other. Raises StoreError."""
        nothing = cls(np.empty(0), np.empty(0), 0, tokens_before, {}, 1.0)
        return nothing.and_then(steps.numbers, steps.fields, steps.column)

    @property
    def reached(self) -> int:
        """Steps done: one more than the number of the last."""
        return int(self.last[-1]) + 1 if self.records else 0

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(self._columns)

    def total(self, name: str) -> float:
        """Sum over all records; 0 for a field that none has."""
        return float(self._columns[name].sums.sum()) if name in self._columns else 0.0

    def mean(self, metric: Metric) -> float | None:
        """Over all records that have the figure, or of the sums of which it is a ratio; None if none has it."""
        if metric.ratio is not None:
            return metric.of({name: self.total(name) for name in metric.ratio if name in self._columns})
        column = self._columns.get(metric.name)
        known = 0.0 if column is None else float(column.counts.sum())
        return self.total(metric.name) / known if known else None

    def with_tokens_before(self, tokens: float) -> "Summary":
        return replace(self, tokens_before=tokens)

    def and_then(self, numbers: Floats, fields: Iterable[str], column: Callable[[str], Floats]) -> "Summary":
        """With further records: their step `numbers` [k], all above the last, and a column [k] of each field."""
        if not len(numbers):
            return self
        width = self._wide_enough(numbers)
        starts = _starts(numbers, width)
        found = {name: _Column.of(column(name)).joined(starts) for name in fields if is_summed(name)}
        for metric in STEP:
            if metric.name not in found and (values := of_steps(metric, found, column)) is not None:
                found[metric.name] = _Column.of(values).joined(starts)
        ends = np.append(starts[1:], len(numbers)) - 1
        return self._with(numbers[starts], numbers[ends], found, len(numbers), width)

    def curve(self, name: str, axis: Axis = "steps") -> Curve:
        """Of one field; empty if no record has it."""
        column = self._columns.get(name)
        if column is None:
            return Curve(*(np.empty(0) for _ in range(4)))
        known = column.counts > 0
        means = column.sums[known] / column.counts[known]
        return Curve(self._middles(axis)[known], means, column.lows[known], column.highs[known])

    def along(self, done: Sequence[float] | Floats, axis: Axis) -> Floats:
        """Return where a number of steps done lies on an axis: [n] float64 for n of them."""
        at = np.asarray(done, dtype=np.float64)
        if axis == "steps" or not self.records:
            return at
        edges = np.append(self.first[:1], self.last + 1)
        return np.interp(at, edges, self._reached(axis))

    def _middles(self, axis: Axis) -> Floats:
        if axis == "steps":
            return (self.first + self.last) / 2
        reached = self._reached(axis)
        return (reached[:-1] + reached[1:]) / 2

    def _reached(self, axis: Axis) -> Floats:
        """[m + 1] tokens or hours before the first bin, and after each."""
        name, unit, before = (
            ("tokens", 1.0, self.tokens_before) if axis == "tokens" else ("seconds", 3600.0, 0.0)
        )
        sums = self._columns[name].sums if name in self._columns else np.zeros(len(self.first))
        return before + np.append(0.0, np.cumsum(sums)) / unit

    def _wide_enough(self, numbers: Floats) -> float:
        """Return a width that keeps the bins few, a power of two."""
        begin = float(self.first[0]) if self.records else float(numbers[0])
        width = self._width
        while (float(numbers[-1]) - begin) / width >= _MOST_BINS:
            width *= 2
        return width

    def _with(
        self, first: Floats, last: Floats, found: dict[str, _Column], records: int, width: float
    ) -> "Summary":
        """Old and new bins, neighbours that lie in one of the width joined."""
        begins, ends = np.concatenate([self.first, first]), np.concatenate([self.last, last])
        starts = _starts(begins, width)
        columns = {}
        for name in self._columns.keys() | found.keys():
            before = self._columns.get(name) or _Column.nothing(len(self.first))
            after = found.get(name) or _Column.nothing(len(first))
            columns[name] = before.followed_by(after).joined(starts)
        stops = np.append(starts[1:], len(begins)) - 1
        return Summary(
            begins[starts], ends[stops], self.records + records, self.tokens_before, columns, width
        )


def of_steps(metric: Metric, fields: Container[str], column: Callable[[str], Floats]) -> Floats | None:
    """[n] values of a figure, given a column of each of the `fields` of n steps; None if it is not there."""
    if metric.name in fields:
        return column(metric.name)
    if metric.ratio is None or not all(name in fields for name in metric.ratio):
        return None
    part, whole = map(column, metric.ratio)
    return part / np.maximum(whole, 1e-9)


def _starts(numbers: Floats, width: float) -> NDArray[np.int64]:
    """Return where the bins begin among rising step numbers."""
    return np.append(0, np.flatnonzero(np.diff(numbers // width)) + 1).astype(np.int64)
