"""Follows a run's records as they are written, so that a page, a tracker or a web server gets each record once.

Records are stored in numbered segments, some of them in packs (`launcher.runtime.run.segments`): `unread_segments`
reads those after a given segment, in order. `EventFollower` follows all events. `LineageFollower` follows the steps and
evaluations of the committed lineage: those that lead to the newest checkpoint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from checkpoints.attempt import Attempt, newest_attempt_number
from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointName, LineageSegment
from checkpoints.listing import list_committed, read_manifest
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import StoreError
from launcher.errors import RunError
from launcher.runtime.run.log import OPERATOR_ATTEMPT
from launcher.runtime.run.segments import (
    EVENTS,
    METRICS,
    DamagedPack,
    Pack,
    SegmentRange,
    list_segments,
    read_segments,
    segment_key,
    segment_prefix,
)
from launcher.runtime.run.step_table import NotARecord, Record, parse_line, parse_records


def unread_segments(
    store: Store,
    folder: str,
    attempt: int,
    after: int,
    damage: list[str],
    listed: list[SegmentRange] | None = None,
) -> Iterator[tuple[int, str, bytes]]:
    """Yield number, name and bytes of an attempt's segments after number `after`.

    A damaged pack is reported in `damage`, and replaced by one empty segment with the pack's last number. Raises
    StoreError.

    Args:
        listed: the attempt's objects, if the caller has listed them already.
    """
    for stretch, data in read_segments(store, folder, attempt, listed, after):
        try:
            found = [(stretch.first, data)] if data is not None else Pack(store, stretch).segment_contents()
            for number, content in found:
                if number > after:
                    yield number, f"{store.uri}/{segment_key(folder, attempt, number)}", content
        except DamagedPack as error:
            damage.append(error.problem)
            yield stretch.last, f"{store.uri}/{stretch.key}", b""
        after = stretch.last


def read_events(
    store: Store, listed: Mapping[int, list[SegmentRange]], after: dict[int, int], damage: list[str]
) -> Iterator[Record]:
    """Yield the events of each attempt from its objects `listed[attempt]`, after segment number `after[attempt]`.

    `after` is set to the number of each segment that is read. Lines that are not events are reported in `damage`.

    Raises:
        StoreError: the store cannot be read.
        RunError: a newer version wrote one of the events.
    """
    for attempt, stretches in listed.items():
        for number, name, data in unread_segments(store, EVENTS, attempt, after.get(attempt, -1), damage, stretches):
            after[attempt] = number
            events = [_parse_event(line, name) for line in data.splitlines()]
            for line, event in enumerate(events, start=1):
                if event is None:
                    damage.append(f"{name}, line {line}: not an event")
                else:
                    yield event


def _parse_event(line: bytes, name: str) -> Record | None:
    """Return the event in a line of the segment `name`; None if the line is not an event. Raises RunError if a newer
    version wrote it."""
    try:
        event = parse_line(line, name)
    except (ValueError, RecursionError):
        return None
    known = isinstance(event, dict) and isinstance(event.get("kind"), str)
    whole = known and isinstance(event.get("time"), int | float) and isinstance(event.get("attempt"), int)
    return event if whole else None


class EventFollower:
    """Returns each event of a run once, as events are written. With `past`, it begins with the events already stored.

    A call of `read_new` without new events makes three requests and no listing.
    """

    def __init__(self, store: Store, *, past: bool = False) -> None:
        self._store = store
        self._attempt = 1 if past else newest_attempt_number(store) + 1  # without `past`, the next attempt
        self._after: dict[int, int] = {}
        self._refused: RunError | None = None  # an error that the next call of `read_new` raises
        if not past:
            self._after[OPERATOR_ATTEMPT] = max(
                (stretch.last for stretch in self._segment_ranges(OPERATOR_ATTEMPT)), default=-1
            )

    def read_new(self) -> list[Record]:
        """Return the events since the last call, in order of time. Lines that are not events are skipped.

        If reading fails after some events, these are returned. If the cause was an event of a newer version, the next
        call raises that error, and the call after it continues with the next segment.

        Raises:
            StoreError: the store cannot be read.
            RunError: a newer version wrote the next event.
        """
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        found: list[Record] = []
        try:
            for event in self._unread_events():
                found.append(event)  # kept even if reading the next event fails
        except (StoreError, RunError) as error:
            if not found:
                raise
            if isinstance(error, RunError):  # `_after` is past this segment already
                self._refused = error
        return sorted(found, key=lambda event: float(event["time"]))

    def _unread_events(self) -> Iterator[Record]:
        yield from self._read_attempt(OPERATOR_ATTEMPT)
        left = True
        while left:  # if a newer attempt was claimed before reading, this one is complete
            left = Attempt(self._store, self._attempt + 1).is_claimed()
            yield from self._read_attempt(self._attempt)
            self._attempt += left

    def _read_attempt(self, attempt: int) -> Iterator[Record]:
        following = self._after.get(attempt, -1) + 1
        if self._store.size(segment_key(EVENTS, attempt, following)) is not None:
            yield from read_events(self._store, {attempt: self._segment_ranges(attempt)}, self._after, [])

    def _segment_ranges(self, attempt: int) -> list[SegmentRange]:
        return list_segments(self._store, segment_prefix(EVENTS, attempt)).get(attempt, [])


class LineageCursor(StrictRecord):
    """The position of a `LineageFollower`, from which another follower can continue.

    Attributes:
        taken: the parts of the lineage whose records were returned; the last one stops at the next step.
        after: number of the last metrics segment that was returned completely, in the attempt of `taken[-1]`.
        evaluated: step of the newest evaluation that was returned; -1 if there is none.
        returned: the last returned step plus 1; None in cursors of earlier versions. It may be less than the stop of
            `taken`: an attempt that resumed from an in-memory copy may write records of steps before its start, which
            the attempt before could not write.
    """

    taken: tuple[LineageSegment, ...] = ()
    after: int = -1
    evaluated: int = -1
    returned: int | None = None

    @property
    def next_step(self) -> int:
        stop = self.taken[-1].stop if self.taken else 0
        return stop if self.returned is None else self.returned


@dataclass(frozen=True)
class LineageNews:
    """New records of a run's committed lineage.

    Attributes:
        superseded_from: step to which the run went back; None if it did not. Before adding `records`, drop all step
            and evaluation records with this step number or a higher one.
        records: step and evaluation records, in order.
        more: whether more records are available already: call again.
        damage: messages about what could not be read.
    """

    superseded_from: int | None
    records: tuple[Record, ...]
    more: bool
    damage: tuple[str, ...]


class LineageFollower:
    """Returns each step and evaluation record of a run's committed lineage once, up to the newest checkpoint.

    A call without new records lists the checkpoints and the metrics of one attempt. Records that an attempt wrote after
    a later attempt had committed are not returned.

    Attributes:
        cursor: where the next call continues. Save it after processing the returned records, and pass it to a new
            follower after a restart.
    """

    def __init__(self, store: Store, cursor: LineageCursor | None = None) -> None:
        self._store, self.cursor = store, cursor or LineageCursor()
        self._newest: tuple[CheckpointName, tuple[LineageSegment, ...]] | None = None

    def read_new(self, max_records: int = 4096) -> LineageNews:
        """Return the next records, at most `max_records`. After a StoreError, the next call reads the same records."""
        lineage = self._lineage()
        if lineage is None:
            return LineageNews(None, (), False, ())
        cursor, superseded = _rewound_cursor(self.cursor, lineage)
        taking = _NewRecords(self._store, max_records)
        for part in lineage[max(0, len(cursor.taken) - 1) :]:
            cursor = taking.add_from(part, _cursor_in(cursor, part))
            if taking.is_full:
                break
        self.cursor = cursor
        return LineageNews(superseded, tuple(taking.records), taking.is_full, tuple(taking.damage))

    def _lineage(self) -> tuple[LineageSegment, ...] | None:
        """Return the lineage of the newest checkpoint; None if there is no checkpoint, or its manifest is
        unreadable."""
        marks = list_committed(self._store)
        if not marks:
            return None
        if self._newest is None or self._newest[0] != marks[0]:
            try:
                self._newest = marks[0], read_manifest(self._store, marks[0]).lineage
            except (DamagedCheckpoint, NewerFormat):
                return None
        return self._newest[1]


@dataclass
class _NewRecords:
    """Collects at most `most` new records, one part of the lineage after another."""

    store: Store
    most: int
    records: list[Record] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.records) >= self.most

    def add_from(self, part: LineageSegment, cursor: LineageCursor) -> LineageCursor:
        """Add the unread records of `part`, and return the cursor after them. `cursor` must point into `part`."""
        after, reached, evaluated = cursor.after, cursor.next_step, cursor.evaluated
        for number, name, data in unread_segments(self.store, METRICS, part.attempt, after, self.damage):
            for line, record in parse_records(name, data):
                if isinstance(record, NotARecord):
                    self.damage.append(f"{name}, line {line}: {record}")
                    continue
                step, is_step = int(record["step"]), record["kind"] == "step"
                if self.is_full or (step >= part.stop if is_step else step > part.stop):
                    break
                if is_step and step >= reached:
                    reached = step + 1
                    self.records.append(record)
                elif not is_step and step > evaluated:
                    evaluated = step
                    self.records.append(record)
            else:
                after = number
                continue
            break
        here = part.model_copy(update={"stop": max(part.start, reached)})
        taken = (*cursor.taken[:-1], here)
        return LineageCursor(taken=taken, after=after, evaluated=evaluated, returned=reached)


def _rewound_cursor(cursor: LineageCursor, lineage: tuple[LineageSegment, ...]) -> tuple[LineageCursor, int | None]:
    """Move `cursor` back to the last step that is still in `lineage`. Return it, and the first returned step that was
    superseded; None if there is none."""
    taken = cursor.taken
    common = 0
    while common < len(taken) and common < len(lineage) and taken[common] == lineage[common]:
        common += 1
    rest = taken[common:]
    if not rest:
        return cursor, None
    now = lineage[common] if common < len(lineage) else None
    same = now is not None and (now.attempt, now.start) == (rest[0].attempt, rest[0].start)
    if now is not None and same and len(rest) == 1 and rest[0].stop <= now.stop:
        return cursor, None  # nothing was superseded: the lineage has only grown
    step = min(rest[0].stop, now.stop) if now is not None and same else rest[0].start
    kept = (*taken[:common], rest[0].model_copy(update={"stop": step})) if same else taken[:common]
    # The last attempt of `kept` is read again from its first segment; `returned` skips the records returned before.
    superseded = taken[-1].stop > step
    back = LineageCursor(
        taken=kept,
        evaluated=min(cursor.evaluated, step - superseded),
        returned=min(cursor.next_step, step),
    )
    return back, (step if superseded else None)


def _cursor_in(cursor: LineageCursor, part: LineageSegment) -> LineageCursor:
    """Return `cursor` if it points into `part`, else a cursor at the beginning of `part`."""
    last = cursor.taken[-1] if cursor.taken else None
    if last is not None and (last.attempt, last.start) == (part.attempt, part.start):
        return cursor
    before = (*cursor.taken[:-1], last.model_copy(update={"stop": part.start})) if last is not None else ()
    begun = LineageSegment(attempt=part.attempt, start=part.start, stop=part.start)
    return LineageCursor(taken=(*before, begun), evaluated=cursor.evaluated, returned=cursor.next_step)
