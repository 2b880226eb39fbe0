"""Reads what a page shows of a run, or of a folder of runs, from the store. Reads are repeated while somebody looks at
the page. If a read fails, the last good value is still shown."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import ValidationError

from data_service.errors import UserError
from data_service.store.base import Store, together
from launcher.observe.inspect.kept_baselines import kept_baselines
from launcher.observe.inspect.report.figures import Account
from launcher.observe.inspect.report.page import ReportSubject
from launcher.observe.inspect.report.task_table import RowReader, TableRow
from launcher.observe.inspect.status import RunStatus, Unreadable, status, status_by
from launcher.observe.watch.records import LiveRecords
from launcher.runtime.run.evaluations import Evaluated, EvaluationReader
from launcher.runtime.run.outline import Outline, outline, read_files, runs_at

_SELDOM_S = 30.0  # between reads of what changes rarely: results of evaluations, runs that have ended


@dataclass(frozen=True)
class SeenRun:
    """A run at the time when it was read.

    Attributes:
        subject, account, status: what the page says of the run.
        waiting: share of the newest steps' time that their slowest rank waited for data; None before the first step.
    """

    subject: ReportSubject
    account: Account
    status: RunStatus
    waiting: float | None


@dataclass(frozen=True)
class SeenFolder:
    """The runs of a folder by name, which is the last part of their URI."""

    runs: dict[str, RunStatus | Unreadable]


class _Sketch:
    """The outline of a run. It is parsed again only if its files have changed."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri, self._store = uri, store
        self._files: tuple[bytes, bytes] | None = None
        self._made: Outline | None = None

    def read(self) -> Outline:
        """Return the outline. Raises RunError, StoreError."""
        files = read_files(self._uri, self._store)
        if self._made is None or files != self._files:
            self._made, self._files = outline(self._uri, self._store, *files), files
        return self._made


@dataclass(frozen=True)
class _Results:
    """The results that were measured beside a run's training."""

    baselines: dict[str, float]
    evaluated: tuple[Evaluated, ...]
    rows: list[TableRow]


class RunReader:
    """Reads a run repeatedly. Each call reads only what is new. `clock` returns seconds since 1970."""

    def __init__(self, uri: str, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._sketch, self._records = _Sketch(uri, store), LiveRecords(store)
        self._evaluations, self._rows = EvaluationReader(store), RowReader(store)
        self._beside: tuple[float, _Results] | None = None

    def read(self) -> SeenRun:
        """Return the run as it is now.

        Raises:
            RunError: there is no run, or its files are damaged.
            StoreError: the store cannot be read.
        """
        run = self._sketch.read()
        self._records.update()
        found = status_by(run, self._records.recent, self._clock(), brief=True)
        account = self._records.account
        if run.origins:  # tokens before the fork; too low while the newest checkpoint is older than `recent`
            before = float(found.tokens - account.figures.tokens)
            self._records.tokens_before = max(self._records.tokens_before, before)
        return SeenRun(self._subject(run), account, found, self._records.waiting)

    def _subject(self, run: Outline) -> ReportSubject:
        if self._beside is None or self._clock() - self._beside[0] > _SELDOM_S:
            self._beside = self._clock(), self._read_beside(run)
        beside = self._beside[1]
        return ReportSubject(
            name=run.name,
            uri=run.uri,
            created=run.record.created,
            total_steps=run.total_steps,
            recipe=run.recipe,
            facts=run.facts(),
            baselines=beside.baselines,
            beside=beside.evaluated,
            evaluated=beside.rows,
        )

    def _read_beside(self, run: Outline) -> _Results:
        try:
            baselines = kept_baselines(run.store, run.record.fingerprint)
        except ValidationError:  # damaged; the next report computes them again
            baselines = None
        named = baselines.named() if baselines else {}
        return _Results(named, tuple(self._evaluations.read()), self._rows.read())


class FolderReader:
    """Reads the runs of a folder repeatedly. Runs that have ended are read less often."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri, self._store = uri, store
        self._sketches: dict[str, _Sketch] = {}
        self._known: dict[str, tuple[float, RunStatus | Unreadable]] = {}

    def read(self) -> SeenFolder:
        """Return the runs as they are now. Raises RunError if there is no run; StoreError if the folder cannot be
        read."""
        names = [uri.rpartition("/")[2] for uri in runs_at(self._uri, self._store)]
        found = dict(zip(names, together(self._look, names), strict=True))
        for gone in self._known.keys() - found.keys():
            del self._known[gone], self._sketches[gone]
        return SeenFolder(found)

    def _look(self, name: str) -> RunStatus | Unreadable:
        now = time.time()
        at, known = self._known.get(name, (0.0, None))
        if isinstance(known, RunStatus) and known.state != "running" and now - at < _SELDOM_S:
            return known
        uri = f"{self._uri.rstrip('/')}/{name}"
        sketch = self._sketches.setdefault(name, _Sketch(uri, self._store.at(name)))
        try:
            seen: RunStatus | Unreadable = status(sketch.read(), now, brief=True)
        except UserError as error:
            seen = Unreadable(uri, error.problem)
        self._known[name] = now, seen
        return seen


_EVERY_S = 2.0  # shortest wait between two reads
_SHARE = 5.0  # the wait is at least so many times the duration of the last read: a sixth of a core at most
_IDLE_S = 60.0  # reading ends so long after the last look
_FIRST_S = 3.0  # longest wait of a look for the first read

T = TypeVar("T")


@dataclass(frozen=True)
class View(Generic[T]):
    """What is known now. Times are in seconds.

    Attributes:
        value: result of the last successful read; None before it.
        version: number that changes with every value.
        age: time since the last successful read.
        error: reason why the last read failed; None if it did not.
        failing: time since the first of the last failed reads in a row.
        reading: time that the present read has taken; None if there is none.
    """

    value: T | None
    version: int
    age: float
    error: str | None
    failing: float
    reading: float | None


class Watched(Generic[T]):
    """Calls `read` repeatedly on its own thread, from the first look until nobody has looked for a minute.

    A look returns the last value at once. If nobody has looked for a minute, that value is old: then looks wait, for a
    short time, until a new read has ended.
    """

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._changed = threading.Condition()
        self._running = False
        self._fresh = False  # whether a read has ended, successful or not, since the thread was started
        self._woken = 0.0
        self._looked = 0.0
        self._value: T | None = None
        self._version = 0
        self._read_at = 0.0
        self._error: str | None = None
        self._failed_at = 0.0
        self._began: float | None = None

    def look(self, patience_s: float = _FIRST_S) -> View[T]:
        """Return what is known now. If the thread was just started, wait for its first read, at most `patience_s`
        seconds after the start."""
        with self._changed:
            self._looked = self._clock()
            if not self._running:
                self._running, self._fresh, self._woken = True, False, self._looked
                threading.Thread(target=self._run, name="watch", daemon=True).start()
            self._changed.wait_for(lambda: self._fresh, max(0.0, self._woken + patience_s - self._looked))
            now = self._clock()
            return View(
                self._value,
                self._version,
                now - self._read_at,
                self._error,
                now - self._failed_at,
                None if self._began is None else now - self._began,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._began = self._clock()
            value, error = self._try()
            with self._changed:
                now = self._clock()
                took, self._began = now - self._began, None
                self._take(value, error, now)
                self._fresh = True
                self._changed.notify_all()
                self._changed.wait(max(_EVERY_S, _SHARE * took))
                if self._clock() - self._looked > _IDLE_S:
                    self._running = False
                    return

    def _try(self) -> tuple[T | None, str | None]:
        try:
            return self._read(), None
        except UserError as error:
            return None, error.problem
        except Exception as error:  # any program may have written the records: show it, and read again
            return None, f"its records cannot be used: {type(error).__name__}: {error}"

    def _take(self, value: T | None, error: str | None, now: float) -> None:
        if error is None:
            self._value, self._read_at = value, now
            self._version += 1
        elif self._error is None:
            self._failed_at = now
        self._error = error
