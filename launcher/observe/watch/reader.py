"""What a page shows of a run, or of a folder of runs, read from its store."""

import time
from collections.abc import Callable
from dataclasses import dataclass

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

_SELDOM_S = 30.0  # between looks at what changes seldom: results of evaluations, runs that have ended


@dataclass(frozen=True)
class SeenRun:
    """A run as it was when it was read.

    Attributes:
        waiting: share of the newest steps' time that their slowest rank waited for data; None before the first step.
    """

    subject: ReportSubject
    account: Account
    status: RunStatus
    waiting: float | None


@dataclass(frozen=True)
class SeenFolder:
    """A folder's runs, by name: the last part of their URI."""

    runs: dict[str, RunStatus | Unreadable]


class _Sketch:
    """A run in outline, parsed again only when its files have changed."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri, self._store = uri, store
        self._files: tuple[bytes, bytes] | None = None
        self._made: Outline | None = None

    def read(self) -> Outline:
        """Raises RunError, StoreError."""
        files = read_files(self._uri, self._store)
        if self._made is None or files != self._files:
            self._made, self._files = outline(self._uri, self._store, *files), files
        return self._made


@dataclass(frozen=True)
class _Beside:
    """What was measured of a run beside its training."""

    baselines: dict[str, float]
    evaluated: tuple[Evaluated, ...]
    rows: list[TableRow]


class RunReader:
    """Reads a run again and again; each time what is new. `clock` in seconds since 1970."""

    def __init__(self, uri: str, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._sketch, self._records = _Sketch(uri, store), LiveRecords(store)
        self._evaluations, self._rows = EvaluationReader(store), RowReader(store)
        self._beside: tuple[float, _Beside] | None = None

    def read(self) -> SeenRun:
        """Raises RunError: there is no run, or its files are damaged. StoreError: the store cannot be read."""
        run = self._sketch.read()
        self._records.update()
        found = status_by(run, self._records.recent, self._clock(), brief=True)
        account = self._records.account
        if (
            run.origins
        ):  # what the runs before it trained on; too low where the newest checkpoint is not recent
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

    def _read_beside(self, run: Outline) -> _Beside:
        try:
            baselines = kept_baselines(run.store, run.record.fingerprint)
        except ValidationError:  # computed anew by the next report
            baselines = None
        named = baselines.named() if baselines else {}
        return _Beside(named, tuple(self._evaluations.read()), self._rows.read())


class FolderReader:
    """Reads the runs of a folder, those that have ended seldom."""

    def __init__(self, uri: str, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._uri, self._store, self._clock = uri, store, clock
        self._sketches: dict[str, _Sketch] = {}
        self._known: dict[str, tuple[float, RunStatus | Unreadable]] = {}

    def read(self) -> SeenFolder:
        """Raises RunError: there is no run. StoreError: the folder cannot be read."""
        names = [uri.rpartition("/")[2] for uri in runs_at(self._uri, self._store)]
        found = dict(zip(names, together(self._look, names), strict=True))
        for gone in self._known.keys() - found.keys():
            del self._known[gone], self._sketches[gone]
        return SeenFolder(found)

    def _look(self, name: str) -> RunStatus | Unreadable:
        now = self._clock()
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
