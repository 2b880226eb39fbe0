"""Summarises step records in bounded memory, for charts and totals, however many steps a run has.

Steps are put into bins of equal width. For each field a bin keeps sum, count, minimum and maximum. When there are too
many bins, the width doubles and neighbours are merged, so sums, counts and extremes stay exact. Records can be added at
the end; if a run goes back, it is summarised anew.
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
    """The sums, counts, minima and maxima of one field in m bins: [m] float64 each."""

    sums: Floats
    counts: Floats
    lows: Floats
    highs: Floats

    @classmethod
    def of(cls, values: Floats) -> "_Column":
        """Return a bin for each value. The bin of a value that is not finite is empty."""
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
        """Return the column with the bins from each of `starts` to the next merged into one."""
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
    """A field along an axis: [n] float64 each. x increases; `low` and `high` are the extremes around each mean `y`."""

    x: Floats
    y: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Summary:
    """The summary of step records, whose steps strictly increase. It is never changed: `and_then` returns another.

    Attributes:
        first, last: [m] number of the first and of the last step in each of m bins.
        records: number of records.
        tokens_before: number of tokens trained on before the first record, by the runs that a fork comes from.
    """

    first: Floats
    last: Floats
    records: int
    tokens_before: float
    _columns: dict[str, _Column]
    _width: float

    @classmethod
    def of(cls, steps: StepHistory, tokens_before: float = 0.0) -> "Summary":
        """Return the summary of a history. Reads one column after the other. Raises StoreError."""
        nothing = cls(np.empty(0), np.empty(0), 0, tokens_before, {}, 1.0)
        return nothing.and_then(steps.numbers, steps.fields, steps.column)

    @property
    def reached(self) -> int:
        """The number of steps done: one more than the number of the last step."""
        return int(self.last[-1]) + 1 if self.records else 0

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(self._columns)

    def total(self, name: str) -> float:
        """Return the sum of a field over all records; 0 if none has it."""
        return float(self._columns[name].sums.sum()) if name in self._columns else 0.0

    def mean(self, metric: Metric) -> float | None:
        """Return the mean of a figure over all records that have it; for a ratio, the ratio of the sums. None if no
        record has it."""
        if metric.ratio is not None:
            return metric.of({name: self.total(name) for name in metric.ratio if name in self._columns})
        column = self._columns.get(metric.name)
        known = 0.0 if column is None else float(column.counts.sum())
        return self.total(metric.name) / known if known else None

    def with_tokens_before(self, tokens: float) -> "Summary":
        return replace(self, tokens_before=tokens)

    def and_then(self, numbers: Floats, fields: Iterable[str], column: Callable[[str], Floats]) -> "Summary":
        """Return the summary with k further records.

        Args:
            numbers: [k] numbers of their steps, which increase and are above the last.
            fields: names of their fields.
            column: function that returns the column [k] of a field.
        """
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
        """Return the curve of a field; empty if no record has it."""
        column = self._columns.get(name)
        if column is None:
            return Curve(*(np.empty(0) for _ in range(4)))
        known = column.counts > 0
        means = column.sums[known] / column.counts[known]
        return Curve(self._middles(axis)[known], means, column.lows[known], column.highs[known])

    def along(self, done: Sequence[float] | Floats, axis: Axis) -> Floats:
        """Return [n] float64, the places on an axis of n numbers of steps done."""
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
        """Return [m + 1], the tokens or hours before the first bin and after each bin."""
        name, unit, before = (
            ("tokens", 1.0, self.tokens_before) if axis == "tokens" else ("seconds", 3600.0, 0.0)
        )
        sums = self._columns[name].sums if name in self._columns else np.zeros(len(self.first))
        return before + np.append(0.0, np.cumsum(sums)) / unit

    def _wide_enough(self, numbers: Floats) -> float:
        """Return the width of bins, a power of two, with which there are not too many."""
        begin = float(self.first[0]) if self.records else float(numbers[0])
        width = self._width
        while (float(numbers[-1]) - begin) / width >= _MOST_BINS:
            width *= 2
        return width

    def _with(
        self, first: Floats, last: Floats, found: dict[str, _Column], records: int, width: float
    ) -> "Summary":
        """Return the summary with old and new bins, merged to bins of `width`."""
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
    """Return [n], the values of a figure in n steps, given the function `column` for each of the `fields`. None if the
    fields do not give it."""
    if metric.name in fields:
        return column(metric.name)
    if metric.ratio is None or not all(name in fields for name in metric.ratio):
        return None
    part, whole = map(column, metric.ratio)
    return part / np.maximum(whole, 1e-9)


def _starts(numbers: Floats, width: float) -> NDArray[np.int64]:
    """Return the indices among increasing step numbers at which bins begin."""
    return np.append(0, np.flatnonzero(np.diff(numbers // width)) + 1).astype(np.int64)
