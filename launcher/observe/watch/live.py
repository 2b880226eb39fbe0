"""Draws a run's report again and again while a browser requests it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from checkpoints.errors import DamagedCheckpoint
from data_service.errors import UserError
from data_service.store.base import Entry, Store, digest
from data_service.store.local import LocalStore
from launcher.errors import OptionError
from launcher.observe.inspect.kept_baselines import baselines_fingerprint, load_baselines
from launcher.observe.inspect.report.page import draw_page
from launcher.runtime.run.outline import Outline, open_outline, runs_at
from launcher.runtime.run.removals import RemovalHistory, read_removals

_MIN_DRAW_WAIT_S = 2.0  # shortest wait between two drawings
_MIN_WAIT_PER_DRAW_TIME = 5.0  # shortest wait in multiples of the last drawing time: uses 1/6 of a core at most
_IDLE_TIMEOUT_S = 60.0  # seconds without a request after which drawing stops
_FIRST_DRAW_TIMEOUT_S = 3.0  # longest wait of a request for the first drawing


def draw_run_page(uri: str, store: Store, head_html: str) -> str:
    """Return the report on the run at `uri` as it is now. Raises RunError, StoreError."""
    run = open_outline(uri, store)
    return draw_page(run, stored_baselines(run), datetime.now(UTC), head_html)


def require_one_run(uri: str, store: Store) -> None:
    """Check that `uri` is not a folder of runs. A run that is not there yet is allowed. Raises OptionError."""
    runs: list[str] = []
    with suppress(UserError):
        runs = runs_at(uri, store)
    if runs not in ([], [uri]):
        raise OptionError(
            f"{uri} is a folder of {len(runs):,} runs",
            remedy=f"watch one of them, such as {runs[0]}; `maskfleet runs status` shows all in a table",
        )


def stored_baselines(run: Outline) -> dict[str, float]:
    """Return the stored losses of the count models on the rows that the run evaluates now, by name; {} if they are not
    stored, or a removal record is damaged, so that nobody knows these rows. Raises StoreError."""
    try:
        removals = RemovalHistory(run.record.inputs.removals, read_removals(run.store)).newest_states
    except DamagedCheckpoint:
        return {}
    known = load_baselines(run.store, baselines_fingerprint(run.record.fingerprint, run.evaluation_samples, removals))
    return known.losses_by_name() if known else {}


class _CachingStore:
    """A store whose objects are read once for each version that a listing shows, and kept in a local folder."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._kept = store, LocalStore(Path(folder))
        self._versions: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in self._store.list(prefix):
            self._versions[entry.key] = entry.version
            yield entry

    def get(self, key: str) -> bytes:
        name = self._copy_object(key)
        return self._store.get(key) if name is None else self._kept.get(name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        name = self._copy_object(key)
        found = self._store if name is None else self._kept
        return found.get_range(name or key, start, length)

    def _copy_object(self, key: str) -> str | None:
        """Return the name of the object's local copy, making it if needed; None if no listing showed the object."""
        if key not in self._versions:
            return None
        name = digest(f"{key}\0{self._versions[key]}".encode())
        if self._kept.size(name) is None:
            self._kept.put(name, self._store.get(key))
        return name


def make_caching_store(store: Store, folder: str) -> Store:
    """Return a store that requests each version of an object of `store` only once, and keeps copies in `folder`. A
    local store is returned unchanged."""
    return store if isinstance(store, LocalStore) else cast("Store", _CachingStore(store, folder))


class LivePage:
    """Calls `draw` repeatedly on its own thread, from the first request until a minute passes without a request.

    A request returns the last page at once. Only after such a minute, when the last page is old, does it wait a short
    time for a new one.
    """

    def __init__(self, draw: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._draw, self._clock = draw, clock
        self._changed = threading.Condition()
        self._running = False
        self._fresh = False  # whether a drawing has ended, successful or not, since the thread was started
        # Times: thread started, page requested, page drawn, first failure since then.
        self._started = self._looked = self._drawn = self._failed = 0.0
        self._html: str | None = None
        self._error: str | None = None
        self._began: float | None = None  # when the present drawing began

    def get_page(self) -> tuple[str | None, dict[str, float | str | None]]:
        """Return the last page that was drawn without an error (None before the first), and its status.

        If the thread was just started, wait a short time for its first drawing. The status has the page's `age`; the
        `error` of the last drawing; how long drawings have been `failing`; and how long the present drawing has been
        `reading`. Times are in seconds. The last three are None if they do not apply.
        """
        with self._changed:
            self._looked = self._clock()
            if not self._running:
                self._running, self._fresh, self._started = True, False, self._looked
                threading.Thread(target=self._draw_until_idle, name="live page", daemon=True).start()
            self._changed.wait_for(lambda: self._fresh, max(0.0, self._started + _FIRST_DRAW_TIMEOUT_S - self._looked))
            now = self._clock()
            return self._html, {
                "age": round(now - self._drawn, 1) if self._html is not None else 0.0,
                "error": self._error,
                "failing": round(now - self._failed, 1) if self._error is not None else None,
                "reading": round(now - self._began, 1) if self._began is not None else None,
            }

    def _draw_until_idle(self) -> None:
        while True:
            with self._changed:
                self._began = self._clock()
            html, error = self._draw_once()
            with self._changed:
                now = self._clock()
                seconds, self._began = now - self._began, None
                if error is None:
                    self._html, self._drawn = html, now
                elif self._error is None:
                    self._failed = now
                self._error, self._fresh = error, True
                self._changed.notify_all()
                self._changed.wait(max(_MIN_DRAW_WAIT_S, _MIN_WAIT_PER_DRAW_TIME * seconds))
                if self._clock() - self._looked > _IDLE_TIMEOUT_S:
                    self._running = False
                    return

    def _draw_once(self) -> tuple[str | None, str | None]:
        try:
            return self._draw(), None
        except UserError as error:
            return None, error.problem
        except Exception as error:  # any program may have written the records: show the error, and try again
            return None, f"its records cannot be used: {type(error).__name__}: {error}"
