"""Reads a run's records as they appear, each once, and keeps them in bounded memory. If the run goes back, all are read
again."""

from dataclasses import dataclass, field

import numpy as np

from data_service.store.base import Store
from launcher.errors import RunError
from launcher.observe.inspect.report.figures import Account, median, rate
from launcher.observe.inspect.report.summary import Floats, Summary
from launcher.runtime.run.following import read_events, unread
from launcher.runtime.run.history import History, StepHistory, read_history
from launcher.runtime.run.segments import EVENTS, METRICS, Stretch, stored
from launcher.runtime.run.step_table import Record, StepTable, TableBuilder

RECENT = 100  # number of newest steps, whose figures count as the present ones
_MOST_DAMAGE = 1000  # largest number of messages kept


@dataclass
class _Kept:
    """The records read of the committed lineage.

    Attributes:
        summary: summary of all step records.
        recent: the newest step records.
        evaluations: the evaluation records.
        repeated: number of step records that were superseded.
        after: number of the last segment read, by attempt.
        damage: messages about what could not be read.
    """

    summary: Summary
    recent: StepHistory
    evaluations: list[Record]
    repeated: int
    after: dict[int, int]
    damage: list[str]

    @property
    def newest_attempt(self) -> int:
        return max(self.after, default=0)

    @property
    def last_step(self) -> float:
        return float(self.summary.last[-1]) if self.summary.records else -1.0

    def add(self, table: StepTable) -> bool:
        """Add the next records. If they supersede earlier ones, change nothing and return False: all must be read
        again."""
        rows = table.columns.get("step", np.empty(0))
        evaluations = [record for _, record in table.others]
        done = [self._evaluated, *(int(record["step"]) for record in evaluations)]
        if np.any(np.diff(rows, prepend=self.last_step) <= 0) or np.any(np.diff(done) <= 0):
            return False
        if len(rows) and self._evaluated > rows[0]:  # the last evaluation is from a later step
            return False
        self.summary = self.summary.and_then(rows, table.columns, table.columns.__getitem__)
        self.recent = _newest(self.recent, table.columns)
        self.evaluations += evaluations
        self.damage += table.damage
        return True

    @property
    def _evaluated(self) -> int:
        return int(self.evaluations[-1]["step"]) if self.evaluations else -1


@dataclass
class _Events:
    """All events of all attempts, in order of time."""

    found: list[Record] = field(default_factory=list)
    after: dict[int, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)

    def update(self, store: Store, listed: dict[int, list[Stretch]]) -> None:
        try:
            self.found += read_events(store, listed, self.after, self.damage)
        except RunError:  # a newer version wrote one: start over, so that the next update raises it again
            self.found, self.after = [], {}
            raise
        self.found.sort(key=lambda event: float(event["time"]))


class LiveRecords:
    """The records of the run at `store`. `update` reads only new records; if there are none, it costs a few
    listings."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: _Kept | None = None
        self._events = _Events()
        self.tokens_before = 0.0

    def update(self) -> None:
        """Read the new records. Raises StoreError; then a later call continues."""
        listed = stored(self._store, f"{METRICS}/")
        events = stored(self._store, f"{EVENTS}/")
        if _restarted(self._events.after, events):
            self._kept, self._events = None, _Events()
        if not self._go_on(listed):
            self._kept = None
        kept = self._kept = self._kept or _whole(self._store)
        self._events.update(self._store, events)
        del kept.damage[_MOST_DAMAGE:]
        del self._events.damage[_MOST_DAMAGE:]

    @property
    def account(self) -> Account:
        """The account of the records read so far."""
        assert self._kept is not None
        kept = self._kept
        return Account.kept(
            kept.summary.with_tokens_before(self.tokens_before),
            tuple(kept.evaluations),
            tuple(self._events.found),
            repeated=kept.repeated,
            tokens_per_second=median(rate(kept.recent)) or 0.0,
            damage=(*kept.damage, *self._events.damage),
        )

    @property
    def recent(self) -> History:
        """The newest steps, with all evaluations and events."""
        assert self._kept is not None
        kept = self._kept
        return History(kept.recent, tuple(kept.evaluations), tuple(self._events.found), 0, 0.0)

    @property
    def waiting(self) -> float | None:
        """The share of the newest steps' time in which the slowest rank waited for data; None before the first step."""
        assert self._kept is not None
        seconds, waited = (
            float(np.nansum(self._kept.recent.column(name))) for name in ("seconds", "data_wait")
        )
        return waited / seconds if seconds else None

    def _go_on(self, listed: dict[int, list[Stretch]]) -> bool:
        """Add the new records of the lineage. Return False if all must be read again."""
        kept = self._kept
        if kept is None or _restarted(kept.after, listed):
            return False
        for attempt, stretches in listed.items():
            after = kept.after.get(attempt, -1)
            if _last(stretches) <= after:
                continue
            if attempt < kept.newest_attempt:
                return False
            builder = TableBuilder()
            for number, name, data in unread(self._store, METRICS, attempt, after, kept.damage, stretches):
                builder.add(number, name, data)
                after = number
            if not kept.add(builder.build()):
                return False
            kept.after[attempt] = after
        return True


def _whole(store: Store) -> _Kept:
    """Read all records."""
    history = read_history(store)
    return _Kept(
        Summary.of(history.steps),
        history.steps.newest(RECENT),
        list(history.evaluations),
        history.repeated,
        history.reached,
        history.damage,
    )


def _restarted(after: dict[int, int], listed: dict[int, list[Stretch]]) -> bool:
    """Return whether segments that were read are gone: then the run was deleted, and perhaps created again."""
    return any(attempt not in listed or _last(listed[attempt]) < last for attempt, last in after.items())


def _last(stretches: list[Stretch]) -> int:
    return max(stretch.last for stretch in stretches)


def _newest(recent: StepHistory, columns: dict[str, Floats]) -> StepHistory:
    """Return the newest step records of `recent` and of `columns`, which follow them."""
    if not len(columns.get("step", ())):
        return recent
    names = recent.fields | columns.keys()
    before, more = len(recent), len(columns["step"])
    joined = {
        name: np.concatenate(
            [
                recent.column(name) if before else np.empty(0),
                columns[name] if name in columns else np.full(more, np.nan),
            ]
        )[-RECENT:]
        for name in names
    }
    return StepHistory.of_columns(joined)
