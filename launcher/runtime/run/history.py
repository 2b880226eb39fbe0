"""Reads the history of a run from its metrics and events, with each step once.

An attempt repeats the steps after the checkpoint that it resumed from. When an attempt records a step, earlier records
of that step and of later steps are superseded. Records may be missing: an attempt that dies while its store does not
answer loses the records it could not write. Every record has its step, so a gap does not shift other records.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from data_service.store.base import Store, parallel_map
from launcher.runtime.run.following import read_events
from launcher.runtime.run.log import OPERATOR_ATTEMPT
from launcher.runtime.run.segments import (
    EVENTS,
    METRICS,
    DamagedPack,
    Pack,
    SegmentRange,
    list_segments,
    read_segments,
    segment_prefix,
    without_overlaps,
)
from launcher.runtime.run.step_table import Floats, Record, StepTable, TableBuilder

_TABLE_ROWS = 1 << 16  # a table is completed when it has this many step records


@dataclass(frozen=True)
class _RowRange:
    """n consecutive step records of a pack or of a table in memory. Their steps strictly increase.

    Attributes:
        columns: the columns by name, or the pack that holds them.
        start: index of the first row in the columns.
        steps: [n] step of each row.
    """

    columns: Pack | dict[str, Floats]
    start: int
    steps: Floats

    @property
    def fields(self) -> Iterable[str]:
        return self.columns.fields if isinstance(self.columns, Pack) else self.columns

    def before_step(self, step: float) -> "_RowRange":
        return _RowRange(self.columns, self.start, self.steps[: int(np.searchsorted(self.steps, step))])

    def column(self, name: str) -> Floats | None:
        if isinstance(self.columns, Pack):
            whole = self.columns.column(name) if name in self.columns.fields else None
        else:
            whole = self.columns.get(name)
        return None if whole is None else whole[self.start : self.start + len(self.steps)]


class StepHistory:
    """The step records of a run as columns, with each step once.

    Columns of packs are read from the store at each call of `column` and not cached, because all fields of a million
    steps would fill the memory of a small machine.

    Attributes:
        numbers: [n] float64, the numbers of the steps, strictly increasing.

    Args:
        damage: list to which a message is added whenever a column cannot be read.
    """

    def __init__(self, parts: Sequence[_RowRange] = (), damage: list[str] | None = None) -> None:
        self._damage = damage if damage is not None else []
        self.numbers = np.concatenate([part.steps for part in parts]) if parts else np.empty(0)
        self._places = np.cumsum([0, *(len(part.steps) for part in parts)]).tolist()  # index of each part's first row
        rows = [self.numbers[slice(*pair)] for pair in pairwise(self._places)]  # views: no second copy
        self._parts = tuple(replace(part, steps=own) for part, own in zip(parts, rows, strict=True))

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> "StepHistory":
        """Return the history made of `records`, whose steps must strictly increase."""
        builder = TableBuilder()
        builder.add(0, "records", "\n".join(json.dumps(record) for record in records).encode())
        table = builder.build()
        return cls([_RowRange(table.columns, 0, table.columns["step"])] if len(records) else ())

    @classmethod
    def from_columns(cls, columns: dict[str, Floats]) -> "StepHistory":
        """Return the history made of `columns`, [n] float64 each. Column `step` must exist and strictly increase."""
        return cls([_RowRange(columns, 0, columns["step"])] if len(columns["step"]) else ())

    def __len__(self) -> int:
        return len(self.numbers)

    def newest(self, count: int) -> "StepHistory":
        """Return the last `count` records (all if there are fewer), read into memory. Raises StoreError."""
        parts: list[_RowRange] = []
        while len(parts) < len(self._parts) and sum(len(part.steps) for part in parts) < count:
            parts.insert(0, self._parts[-1 - len(parts)])
        last = StepHistory(parts, self._damage)
        columns = {name: last.column(name)[-count:].copy() for name in last.fields}
        return StepHistory.from_columns({**columns, "step": last.numbers[-count:].copy()})

    @property
    def fields(self) -> frozenset[str]:
        """Names of all fields that are a number in at least one record."""
        return frozenset(name for part in self._parts for name in part.fields)

    def column(self, name: str) -> Floats:
        """Return field `name` of all records as a new array, [n] float64: NaN where it is missing, no number or
        unreadable.

        Raises StoreError.
        """
        values = np.full(len(self), np.nan)

        def fill_part(part: _RowRange, offset: int) -> None:
            try:
                found = part.column(name)
            except DamagedPack as error:
                self._damage.append(error.problem)
                return
            if found is not None:
                values[offset : offset + len(part.steps)] = found

        for _ in parallel_map(lambda place: fill_part(*place), zip(self._parts, self._places, strict=False)):
            pass
        return values


@dataclass(frozen=True)
class History:
    """The records of a run, with each step once.

    Attributes:
        steps: the step records.
        evaluations: the evaluation records; their steps strictly increase.
        events: all events of all attempts, in order of time.
        repeated: number of step records that a later attempt superseded (work lost to interruptions).
        repeated_seconds: wall time of the superseded steps, in seconds.
        damage: messages about unreadable records. `StepHistory.column` adds one if a column proves to be damaged.
        reached: number of the last metrics segment that was read, by attempt.
    """

    steps: StepHistory
    evaluations: tuple[Record, ...]
    events: tuple[Record, ...]
    repeated: int
    repeated_seconds: float
    damage: list[str] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)


def read_history(store: Store, latest: int | None = None) -> History:
    """Return the history of the run in `store`. Damaged records are skipped and reported in `damage`.

    Args:
        latest: read at most this many of the newest stored objects of metrics, none older than the newest pack; and
            of events only the operator's (`OPERATOR_ATTEMPT`). None: read everything.

    Raises:
        StoreError: the store cannot be read.
        RunError: a newer version wrote some of the records.
    """
    lineage = _LineageRecords()
    for attempt, stretches in _select_objects(list_segments(store, f"{METRICS}/"), latest).items():
        _read_attempt(store, attempt, stretches, lineage)
    prefix = f"{EVENTS}/" if latest is None else segment_prefix(EVENTS, OPERATOR_ATTEMPT)
    listed = _select_objects(list_segments(store, prefix), latest)
    after = {attempt: stretches[0].first - 1 for attempt, stretches in listed.items()}
    events = list(read_events(store, listed, after, lineage.damage))
    return History(
        StepHistory(lineage.parts, lineage.damage),
        tuple(lineage.evaluations),
        tuple(sorted(events, key=lambda event: float(event["time"]))),
        lineage.repeated,
        lineage.repeated_seconds,
        lineage.damage,
        lineage.reached,
    )


@dataclass
class _LineageRecords:
    """The records read so far, without superseded records."""

    parts: list[_RowRange] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    repeated: int = 0
    repeated_seconds: float = 0.0
    reached: dict[int, int] = field(default_factory=dict)

    def add(self, table: StepTable, pack: Pack | None, after: int = -1) -> None:
        """Add the records of `table` that are in segments after number `after`. `pack`: the pack that has the columns
        of its step records; None if `table` has them. Raises DamagedPack."""
        self.damage += table.damage
        start = int(np.searchsorted(table.segments, after, side="right"))
        steps = (pack.column("step") if pack and len(table.segments) else table.columns.get("step", np.empty(0)))[
            start:
        ]
        breaks = np.flatnonzero(np.diff(steps) <= 0) + 1  # steps decrease only if objects were moved by hand
        for run in np.split(np.arange(len(steps)), breaks):
            if len(run):
                self._drop_from_step(float(steps[run[0]]))
                rows = steps[run[0] : run[-1] + 1]
                self.parts.append(_RowRange(pack or table.columns, start + int(run[0]), rows))
        for segment, record in table.others:
            if segment > after:
                self._drop_evaluations(record["step"])
                self.evaluations.append(record)

    def _drop_from_step(self, step: float) -> None:
        """Drop the records of `step` and of later steps. An evaluation with number `step` stays: it precedes the
        step."""
        self._drop_evaluations(step + 1)
        while self.parts and self.parts[-1].steps[-1] >= step:
            part = self.parts.pop()
            kept = part.before_step(step)
            self.repeated += len(part.steps) - len(kept.steps)
            self._count_repeated_seconds(part, len(kept.steps))
            if len(kept.steps):
                self.parts.append(kept)
                break

    def _count_repeated_seconds(self, part: "_RowRange", kept_count: int) -> None:
        """Add the seconds of the rows after `kept_count`: their steps were trained again later."""
        try:
            seconds = part.column("seconds")
        except DamagedPack as error:  # only the seconds of superseded steps are lost
            self.damage.append(error.problem)
            return
        if seconds is not None:
            self.repeated_seconds += float(np.nansum(seconds[kept_count:]))

    def _drop_evaluations(self, step: float) -> None:
        while self.evaluations and self.evaluations[-1]["step"] >= step:
            self.evaluations.pop()


def _select_objects(found: dict[int, list[SegmentRange]], latest: int | None) -> dict[int, list[SegmentRange]]:
    """Return the objects to read, by attempt, so that each segment is read once. With `latest`, return only the newest
    `latest` objects, none older than the newest pack."""
    whole = {attempt: without_overlaps(stretches) for attempt, stretches in found.items()}
    if latest is None:
        return whole
    newest: dict[int, list[SegmentRange]] = {}
    left = latest
    for attempt in reversed(whole):
        for stretch in reversed(whole[attempt]):
            if left <= 0:
                break
            newest.setdefault(attempt, []).insert(0, stretch)
            left = 0 if stretch.packed else left - 1
    return {attempt: newest[attempt] for attempt in sorted(newest)}


def _read_attempt(store: Store, attempt: int, segment_ranges: list[SegmentRange], lineage: _LineageRecords) -> None:
    builder, reached = TableBuilder(), segment_ranges[0].first - 1
    for stretch, data in read_segments(store, METRICS, attempt, segment_ranges, reached):
        if data is not None:
            builder.add(stretch.first, f"{store.uri}/{stretch.key}", data)
        if data is None or len(builder) >= _TABLE_ROWS:
            lineage.add(builder.build(), None)
            builder = TableBuilder()
        if data is None:
            _read_pack(store, stretch, reached, lineage)
        reached = stretch.last
    lineage.add(builder.build(), None)
    lineage.reached[attempt] = reached


def _read_pack(store: Store, segment_range: SegmentRange, after: int, lineage: _LineageRecords) -> None:
    try:
        pack = Pack(store, segment_range)
        lineage.add(pack.table(), pack, after)
    except DamagedPack as error:
        lineage.damage.append(error.problem)
