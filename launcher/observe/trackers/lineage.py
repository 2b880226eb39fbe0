"""Follows the records of a run's committed lineage as they appear, so that they can be passed on, for example to a
tracker."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointName, LineageSegment
from checkpoints.listing import committed, read_manifest
from data_service.store.base import Store
from launcher.runtime.run.segments import METRICS, DamagedPack, Pack, read
from launcher.runtime.run.step_table import NotARecord, Record, parse


class Cursor(BaseModel):
    """How far a `LineageFollower` has come. It is small, and all that another follower needs to continue.

    Attributes:
        taken: the committed lineage as far as it was returned; its last part ends with the last step returned.
        after: the last segment of that part's attempt that has nothing left to return.
        evaluated: the newest evaluation returned was made after so many steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    taken: tuple[LineageSegment, ...] = ()
    after: int = -1
    evaluated: int = 0


@dataclass(frozen=True)
class News:
    """What is new on a lineage.

    Attributes:
        superseded_from: the run went back: records of this step and later ones, and evaluations after more steps than
            this, that were returned earlier, do not count any more. It comes before `records`. None if it did not.
        records: step and evaluation records, in order.
        more: there is more already: ask again.
        damage: what could not be read, for people.
    """

    superseded_from: int | None
    records: tuple[Record, ...]
    more: bool
    damage: tuple[str, ...]


class LineageFollower:
    """Step and evaluation records of the committed lineage of the run at `store`, up to its newest checkpoint.

    While nothing happens, a call costs a listing of the checkpoints and one of an attempt's metrics. A record that an
    attempt could write only after a later attempt had committed is not returned.

    Attributes:
        cursor: where the next call goes on. Keep it when what was returned is dealt with, and give it to the follower
            of the next process.
    """

    def __init__(self, store: Store, cursor: Cursor | None = None) -> None:
        self._store, self.cursor = store, cursor or Cursor()
        self._newest: tuple[CheckpointName, tuple[LineageSegment, ...]] | None = None

    def new(self, most: int = 4096) -> News:
        """What was not returned yet, `most` records at a time. Raises StoreError; a later call goes on from there."""
        lineage = self._lineage()
        if lineage is None:
            return News(None, (), False, ())
        cursor, superseded = _gone_back(self.cursor, lineage)
        taking = _Taking(self._store, most)
        for part in lineage[max(0, len(cursor.taken) - 1) :]:
            cursor = taking.take(part, _at(cursor, part))
            if taking.full:
                break
        self.cursor = cursor
        return News(superseded, tuple(taking.records), taking.full, tuple(taking.damage))

    def _lineage(self) -> tuple[LineageSegment, ...] | None:
        """Of the newest checkpoint; None if there is none, or it cannot be read: the next one tells."""
        marks = committed(self._store)
        if not marks:
            return None
        if self._newest is None or self._newest[0] != marks[0]:
            try:
                self._newest = marks[0], read_manifest(self._store, marks[0]).lineage
            except (DamagedCheckpoint, NewerFormat):
                return None
        return self._newest[1]


@dataclass
class _Taking:
    """Reads `most` records, from one part of a lineage after the other."""

    store: Store
    most: int
    records: list[Record] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.records) >= self.most

    def take(self, part: LineageSegment, cursor: Cursor) -> Cursor:
        """What `part` has left, and where to go on. `cursor` is in it."""
        after, reached, evaluated = cursor.after, cursor.taken[-1].stop, cursor.evaluated
        for number, records in self._segments(part.attempt, after):
            for record in records:
                step, is_step = int(record["step"]), record["kind"] == "step"
                if self.full or (step >= part.stop if is_step else step > part.stop):
                    break
                if is_step and step >= reached:
                    reached = step + 1
                    self.records.append(record)
                elif not is_step and step > max(evaluated, part.start):
                    evaluated = step
                    self.records.append(record)
            else:
                after = number
                continue
            break
        here = part.model_copy(update={"stop": reached})
        return Cursor(taken=(*cursor.taken[:-1], here), after=after, evaluated=evaluated)

    def _segments(self, attempt: int, after: int) -> Iterator[tuple[int, list[Record]]]:
        for number, name, data in self._contents(attempt, after):
            records = []
            for line, record in parse(name, data):
                if isinstance(record, NotARecord):
                    self.damage.append(f"{name}, line {line}: {record}")
                else:
                    records.append(record)
            yield number, records

    def _contents(self, attempt: int, after: int) -> Iterator[tuple[int, str, bytes]]:
        for stretch, data in read(self.store, METRICS, attempt, after=after):
            name = f"{self.store.uri}/{stretch.key}"
            if data is not None:
                yield stretch.first, name, data
                continue
            try:
                inside = list(Pack(self.store, stretch).contents())
            except DamagedPack as error:
                self.damage.append(error.problem)
                continue
            yield from ((number, name, data) for number, data in inside if number > after)


def _gone_back(cursor: Cursor, lineage: tuple[LineageSegment, ...]) -> tuple[Cursor, int | None]:
    """The cursor on what `lineage` has in common with what was returned, and where that ends if more was returned."""
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
        return cursor, None  # it has only grown
    step = min(rest[0].stop, now.stop) if now is not None and same else rest[0].start
    kept = (*taken[:common], rest[0].model_copy(update={"stop": step})) if same else taken[:common]
    # The attempt that is last now is read again from its beginning: what was returned of it is passed over.
    return Cursor(taken=kept, evaluated=min(cursor.evaluated, step)), (
        step if taken[-1].stop > step else None
    )


def _at(cursor: Cursor, part: LineageSegment) -> Cursor:
    """The cursor in `part`: at its beginning unless it is there already. The part before it is over."""
    last = cursor.taken[-1] if cursor.taken else None
    if last is not None and (last.attempt, last.start) == (part.attempt, part.start):
        return cursor
    before = (*cursor.taken[:-1], last.model_copy(update={"stop": part.start})) if last is not None else ()
    begun = LineageSegment(attempt=part.attempt, start=part.start, stop=part.start)
    return Cursor(taken=(*before, begun), evaluated=cursor.evaluated)
