"""Reads a run's metrics and events back: the history of the committed lineage.

An attempt repeats the steps after the checkpoint that it resumed from. In the history each step appears once: when an
attempt records a step, earlier records of that step and of later ones are superseded. Records may be missing, because
an attempt that dies while its store does not answer loses what it could not write. Every record holds its step, so a
gap does not shift the others.
"""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from data_service.store.base import Store
from launcher.runtime.run.following import read_events
from launcher.runtime.run.log import OPERATOR
from launcher.runtime.run.segments import (
    EVENTS,
    METRICS,
    DamagedPack,
    Pack,
    Stretch,
    once,
    read,
    segment_prefix,
    stored,
)
from launcher.runtime.run.step_table import Floats, Record, StepTable, TableBuilder

_ROWS = 1 << 16  # of step records in one table
_READERS = 4  # packs read at a time: on S3 that is bound by latency


@dataclass(frozen=True)
class _Part:
    """Rows [start, start + n) of a pack or of a table in memory, the numbers of their steps strictly increasing.

    Attributes:
        columns: all of them, or where they are.
        steps: [n].
    """

    columns: Pack | dict[str, Floats]
    start: int
    steps: Floats

    @property
    def fields(self) -> Iterable[str]:
        return self.columns.fields if isinstance(self.columns, Pack) else self.columns

    def below(self, step: float) -> "_Part":
        return _Part(self.columns, self.start, self.steps[: int(np.searchsorted(self.steps, step))])

    def column(self, name: str) -> Floats | None:
        if isinstance(self.columns, Pack):
            whole = self.columns.column(name) if name in self.columns.fields else None
        else:
            whole = self.columns.get(name)
        return None if whole is None else whole[self.start : self.start + len(self.steps)]


class StepHistory:
    """The step records of the committed lineage. A field is read when it is asked for, and not kept: all fields of a
    million steps would fill the memory of a small machine.

    Attributes:
        numbers: [n] float64, of the steps, strictly increasing.

    Args:
        damage: takes what proves unreadable later.
    """

    def __init__(self, parts: Sequence[_Part] = (), damage: list[str] | None = None) -> None:
        self._damage = damage if damage is not None else []
        self.numbers = np.concatenate([part.steps for part in parts]) if parts else np.empty(0)
        self._places = np.cumsum([0, *(len(part.steps) for part in parts)]).tolist()
        rows = [self.numbers[slice(*pair)] for pair in pairwise(self._places)]  # views, not a second copy
        self._parts = tuple(replace(part, steps=own) for part, own in zip(parts, rows, strict=True))

    @classmethod
    def of(cls, records: Sequence[Record]) -> "StepHistory":
        """Of step records at hand, steps strictly increasing."""
        builder = TableBuilder()
        builder.add(0, "records", "\n".join(json.dumps(record) for record in records).encode())
        table = builder.build()
        return cls([_Part(table.columns, 0, table.columns["step"])] if len(records) else ())

    @classmethod
    def of_columns(cls, columns: dict[str, Floats]) -> "StepHistory":
        """Of columns at hand, [n] float64 each, one of them `step`, strictly increasing."""
        return cls([_Part(columns, 0, columns["step"])] if len(columns["step"]) else ())

    def __len__(self) -> int:
        return len(self.numbers)

    def newest(self, count: int) -> "StepHistory":
        """Return the last `count` records, or all if there are fewer, read into memory. Raises StoreError."""
        parts: list[_Part] = []
        while len(parts) < len(self._parts) and sum(len(part.steps) for part in parts) < count:
            parts.insert(0, self._parts[-1 - len(parts)])
        last = StepHistory(parts, self._damage)
        columns = {name: last.column(name)[-count:].copy() for name in last.fields}
        return StepHistory.of_columns({**columns, "step": last.numbers[-count:].copy()})

    @property
    def fields(self) -> frozenset[str]:
        """All fields that are numbers in some of the records."""
        return frozenset(name for part in self._parts for name in part.fields)

    def column(self, name: str) -> Floats:
        """[n] float64, a new array; NaN where a record has no number under `name`, or where it cannot be read.

        Raises StoreError.
        """
        values = np.full(len(self), np.nan)

        def fill(part: _Part, place: int) -> None:
            try:
                found = part.column(name)
            except DamagedPack as error:
                self._damage.append(error.problem)
                return
            if found is not None:
                values[place : place + len(part.steps)] = found

        if len(self._parts) == 1:
            fill(self._parts[0], 0)
            return values
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(fill, self._parts, self._places):
                pass
        return values


@dataclass(frozen=True)
class History:
    """What happened along the committed lineage.

    Attributes:
        steps: the step records.
        evaluations: evaluation records, steps strictly increasing.
        events: all events of all attempts, in order of time.
        repeated: number of step records superseded by a later attempt (work lost to interruptions).
        repeated_seconds: their wall time.
        damage: what could not be read, for people; it grows if a field of `steps` turns out to be damaged.
        reached: the last segment of metrics that was read of each attempt.
    """

    steps: StepHistory
    evaluations: tuple[Record, ...]
    events: tuple[Record, ...]
    repeated: int
    repeated_seconds: float
    damage: list[str] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)


def read_history(store: Store, latest: int | None = None) -> History:
    """Return the history of the run stored at `store`, without what is damaged. Raises StoreError; RunError: a newer
    version wrote some of it.

    `latest`: read so many segments of metrics and of operators' events only, the newest, or one pack where there are
    fewer; no events of attempts then.
    """
    lineage = _Lineage()
    for attempt, stretches in _selected(stored(store, f"{METRICS}/"), latest).items():
        _read_attempt(store, attempt, stretches, lineage)
    prefix = f"{EVENTS}/" if latest is None else segment_prefix(EVENTS, OPERATOR)
    listed = _selected(stored(store, prefix), latest)
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
class _Lineage:
    """What was read so far, without what was superseded."""

    parts: list[_Part] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    repeated: int = 0
    repeated_seconds: float = 0.0
    reached: dict[int, int] = field(default_factory=dict)

    def add(self, table: StepTable, pack: Pack | None, after: int = -1) -> None:
        """The next records, those in segments after number `after`. Raises DamagedPack."""
        self.damage += table.damage
        start = int(np.searchsorted(table.segments, after, side="right"))
        steps = (
            pack.column("step") if pack and len(table.segments) else table.columns.get("step", np.empty(0))
        )[start:]
        breaks = np.flatnonzero(np.diff(steps) <= 0) + 1  # none, unless somebody moved objects about
        for run in np.split(np.arange(len(steps)), breaks):
            if len(run):
                self._supersede(float(steps[run[0]]))
                rows = steps[run[0] : run[-1] + 1]
                self.parts.append(_Part(pack or table.columns, start + int(run[0]), rows))
        for segment, record in table.others:
            if segment > after:
                self._drop_evaluations(record["step"])
                self.evaluations.append(record)

    def _supersede(self, step: float) -> None:
        """`step` steps are done before the step `step`, so an evaluation after as many stays."""
        self._drop_evaluations(step + 1)
        while self.parts and self.parts[-1].steps[-1] >= step:
            part = self.parts.pop()
            kept = part.below(step)
            self.repeated += len(part.steps) - len(kept.steps)
            seconds = part.column("seconds")
            if seconds is not None:
                self.repeated_seconds += float(np.nansum(seconds[len(kept.steps) :]))
            if len(kept.steps):
                self.parts.append(kept)
                break

    def _drop_evaluations(self, step: float) -> None:
        while self.evaluations and self.evaluations[-1]["step"] >= step:
            self.evaluations.pop()


def _selected(found: dict[int, list[Stretch]], latest: int | None) -> dict[int, list[Stretch]]:
    """Return each segment once; the newest `latest` objects if that is asked for, and nothing before a pack."""
    whole = {attempt: once(stretches) for attempt, stretches in found.items()}
    if latest is None:
        return whole
    newest: dict[int, list[Stretch]] = {}
    left = latest
    for attempt in reversed(whole):
        for stretch in reversed(whole[attempt]):
            if left <= 0:
                break
            newest.setdefault(attempt, []).insert(0, stretch)
            left = 0 if stretch.packed else left - 1
    return {attempt: newest[attempt] for attempt in sorted(newest)}


def _read_attempt(store: Store, attempt: int, stretches: list[Stretch], lineage: _Lineage) -> None:
    builder, reached = TableBuilder(), stretches[0].first - 1
    for stretch, data in read(store, METRICS, attempt, stretches, reached):
        if data is not None:
            builder.add(stretch.first, f"{store.uri}/{stretch.key}", data)
        if data is None or len(builder) >= _ROWS:
            lineage.add(builder.build(), None)
            builder = TableBuilder()
        if data is None:
            _read_pack(store, stretch, reached, lineage)
        reached = stretch.last
    lineage.add(builder.build(), None)
    lineage.reached[attempt] = reached


def _read_pack(store: Store, stretch: Stretch, after: int, lineage: _Lineage) -> None:
    try:
        pack = Pack(store, stretch)
        lineage.add(pack.table(), pack, after)
    except DamagedPack as error:
        lineage.damage.append(error.problem)
