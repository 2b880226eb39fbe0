"""When a run saves, and which checkpoints it keeps. The training loop calls this."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Protocol

from pydantic import JsonValue

from checkpoints.attempt import Attempt
from checkpoints.commit import Committed, Failed, Outcome
from checkpoints.errors import CheckpointError, SaveFailed
from checkpoints.gather import Peers
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.retention import Tidied, tidy
from checkpoints.save import Saver
from data_service.store.base import Store
from data_service.store.errors import StoreError
from encoder_core.train.engine import Engine
from encoder_core.train.memory import Carried
from encoder_core.train.state import TrainState
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.recipe.schema import Checkpointing
from launcher.runtime.run.record import BEGAN

_SAVING, _TIDYING = "saving", "tidying"  # what a rank says that it is doing
_TIDY_S = 60.0  # to wait for the last deletions


class ExtraState(Protocol):
    """State that a checkpoint holds beside the trainer's (the spike guard's), and which checkpoints a rewind needs."""

    def state(self) -> dict[str, JsonValue]: ...

    def way_back(self, step: int) -> int:
        """A rewind after `step` steps would go back to a checkpoint of at most this many steps."""
        ...


class RunCheckpointer:
    """Saves, commits and deletes the run's checkpoints, as one rank's part of it. When it saves has no influence on
    training.

    A save that fails is recorded, and the next one that is due is the retry; only the last save of a run raises. All
    but the last are taken at multiples of `save_multiple` steps. `extra`: what a checkpoint holds beside the trainer's
    state.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        peers: Peers,
        *,
        settings: Checkpointing,
        journal: RankJournal,
        extra: ExtraState,
        resumed: CheckpointManifest | None,
        save_multiple: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saver = Saver(store, attempt, peers, resumed=resumed)
        self._store, self._attempt, self._rank = store, attempt, peers.rank
        self._settings, self._journal, self._extra = settings, journal, extra
        self._save_multiple, self._clock = save_multiple, clock
        self._begun_at = clock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._tidying: Future[Tidied] | None = None
        self._proven = frozenset({resumed.mark} if resumed else ())  # every rank has read its part of it

    def due(self, step: int) -> bool:
        """Return whether to save once `step` steps are done: a multiple of the interval, or the time has come; where
        that was no multiple of `save_multiple`, then at the next one."""
        if self._saver.underway is not None or step % self._save_multiple:
            return False
        every = self._settings.every
        by_count = (
            every.steps is not None and step // every.steps > (step - self._save_multiple) // every.steps
        )
        by_time = every.minutes is not None and self._clock() - self._begun_at >= 60 * every.minutes
        return by_count or by_time

    def ready(self) -> bool:
        return self._saver.ready()

    def begin(self, engine: Engine, state: TrainState) -> None:
        """Copy and start uploading. Training waits for the copy only."""
        self._begin(engine, state, Carried())

    def commit(self) -> None:
        """Collective. Metrics are flushed first, so that the records of a checkpoint's steps exist when it does. If the
        store is slow to take them, the commit does not wait and they follow."""
        self._commit(since=self._clock())

    def finish(self, engine: Engine, state: TrainState, carried: Carried) -> None:
        """Commit `state`, with the memory that the next step needs, unless it is committed already. Waits until that is
        done.

        A run without a step saves nothing: its next start begins at step 0 again.

        Raises:
            SaveFailed: the store did not take the last save, but may come back. On all ranks, as the others.
            CheckpointError: the last save failed, so the work since the one before would be lost silently.
            Superseded: a newer attempt has been claimed.
        """
        self._journal.doing(state.step, _SAVING)
        if self._saver.underway is not None:
            self._wait_and_commit(state.step)
        if state.step != (self._saver.last_step or 0):
            self._begin(engine, state, carried)
            outcome = self._wait_and_commit(state.step)
            if isinstance(outcome, Failed):
                raise self._lost(outcome)
        self._saver.close()
        self._finish_tidying(state.step)

    def _lost(self, failed: Failed) -> SaveFailed | CheckpointError:
        if failed.transient:
            return SaveFailed(failed.step, self._saver.last_step or 0, failed.reason)
        return CheckpointError(
            f"the final checkpoint of step {failed.step} failed: {failed.reason}",
            remedy="mend the cause and run the same command again: it resumes from the last commit",
        )

    def _begin(self, engine: Engine, state: TrainState, carried: Carried) -> None:
        self._begun_at = self._clock()
        fragments = chain(engine.fragments(), carried.fragments)
        whole = state.to_json() | self._extra.state()
        self._saver.begin(
            state.step, fragments, engine.shapes, whole, carried.shapes, own_kinds=engine.own_kinds
        )

    def _wait_and_commit(self, step: int) -> Outcome:
        """At `step`. Collective; a rank that waits for others shows their progress as its own."""
        since = self._clock()
        self._saver.wait_for_all(lambda sent: self._journal.doing(step, _SAVING, sent))
        return self._commit(since)

    def _commit(self, since: float) -> Outcome:
        self._journal.flush()
        outcome = self._saver.commit()
        self._record(outcome, self._clock() - since)
        return outcome

    def _record(self, outcome: Outcome, waited: float) -> None:
        """`blocked`: how long training waited, for the copy and for the commit."""
        match outcome:
            case Committed():
                self._journal.event(
                    "commit",
                    step=outcome.step,
                    bytes=outcome.bytes,
                    blocked=outcome.blocked_s + waited,
                    seconds=outcome.background_s,
                )
                if self._rank == 0:
                    self._tidy(self._extra.way_back(outcome.step))
            case Failed():
                self._journal.event("commit_failed", step=outcome.step, reason=outcome.reason)
                self._journal.note(f"checkpoint of step {outcome.step} failed: {outcome.reason}")

    def _tidy(self, way_back: int) -> None:
        """Rank 0 deletes expired checkpoints while training goes on. The next commit raises Superseded if these
        deletions found it."""
        self._tidied()
        self._tidying = self._pool.submit(self._tidy_now, way_back, self._proven)

    def _tidy_now(self, way_back: int, proven: frozenset[CheckpointName]) -> Tidied:
        every = self._settings.keep_every.steps if self._settings.keep_every else None
        self._store.put_if_absent(BEGAN, b"{}\n")
        return tidy(
            self._store,
            self._attempt,
            keep_last=self._settings.keep_last,
            keep_every=every,
            way_back=way_back,
            proven=proven,
        )

    def _tidied(self) -> None:
        """Wait for the deletions. If they fail, the checkpoints stay until the next commit."""
        tidying, self._tidying = self._tidying, None
        try:
            if tidying is not None:
                self._proven = tidying.result().proven
        except (StoreError, CheckpointError) as error:
            self._journal.event("tidy_failed", reason=error.problem)

    def _finish_tidying(self, step: int) -> None:
        """All is committed, so what takes too long is left to the next start."""
        if self._tidying is not None:
            self._journal.doing(step, _TIDYING)
            wait([self._tidying], timeout=_TIDY_S)
            if self._tidying.done():
                self._tidied()
            else:
                self._journal.event("tidy_failed", reason=f"it took longer than {_TIDY_S:.0f} s")
        self._pool.shutdown(wait=False, cancel_futures=True)
