"""Decides when a run saves, which checkpoints it keeps, and when its ranks copy their state to the memory of their
nodes (`checkpoints.memory`). The training loop calls this."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Protocol

from pydantic import JsonValue

from checkpoints.attempt import Attempt
from checkpoints.commit import CommittedSave, FailedSave, SaveOutcome
from checkpoints.errors import CheckpointError, SaveFailed
from checkpoints.gather import Peers
from checkpoints.layout import CheckpointName, LineageSegment
from checkpoints.memory import Keeper, MemoryWriter
from checkpoints.memory_slots import CommonDescription
from checkpoints.retention import DeletionReport, delete_expired
from checkpoints.save import Saver
from data_service.store.base import Store
from data_service.store.errors import StoreError
from encoder_core.train.engine import Engine
from encoder_core.train.state import TrainState
from encoder_core.train.xlnet_memory import StoredMemory
from launcher.runtime.policies.recovery import COPY_TIME_SHARE, Recovery
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.resume import ResumePoint
from launcher.runtime.recipe.schema import Checkpointing
from launcher.runtime.run.record import COMMITTED_KEY, Run

_SAVING, _TIDYING = "saving", "tidying"  # activities in a rank's heartbeats
_TIDY_TIMEOUT_S = 60.0  # seconds to wait for the last deletions at the end of training


class ExtraState(Protocol):
    """A part of a run that stores state in checkpoints, and needs older checkpoints for rewinds (the spike guard)."""

    def state(self) -> dict[str, JsonValue]: ...

    def latest_rewind_step(self, step: int) -> int:
        """Return the latest step whose checkpoint a rewind after `step` steps may go back to."""
        ...


class RunCheckpointer:
    """Saves, commits and deletes the run's checkpoints, on one rank. The times of saves do not influence the results of
    training.

    A failed save is recorded, and the next save that is due replaces it. Only a failed last save raises an error.

    Args:
        store: the run's store.
        resumed: the state that this start resumed from; None for a start from step 0. If it comes from memory, the
            first checkpoint is due at once, so that a run whose ranks die often saves nevertheless.
        extra: the part of the run whose state checkpoints hold in addition to the trainer's.
        save_multiple: number of steps; all saves but the last are made at multiples of it.
        clock: function that returns seconds.
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
        resumed: ResumePoint | None,
        save_multiple: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        manifest, stored = (resumed.manifest, resumed.stored) if resumed is not None else (None, None)
        self._saver = Saver(store, attempt, peers, resumed=manifest, stored=stored)
        self._overdue = resumed is not None and resumed.memory is not None
        self._store, self._attempt, self._rank = store, attempt, peers.rank
        self._settings, self._journal, self._extra = settings, journal, extra
        self._save_multiple, self._clock = save_multiple, clock
        self._begun_at = clock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._tidying: Future[DeletionReport] | None = None
        read = manifest is not None and not self._overdue
        # Checkpoints whose every byte was verified: loaded at the start, or read before a deletion that relies on them.
        self._proven = frozenset({manifest.name} if read and manifest else ())

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step` steps, because the interval in steps or minutes is over. If it ended
        between multiples of `save_multiple`, the save is due at the next multiple."""
        if self._saver.pending_step is not None or step % self._save_multiple:
            return False
        every = self._settings.every
        by_count = every.steps is not None and step // every.steps > (step - self._save_multiple) // every.steps
        by_time = every.minutes is not None and self._clock() - self._begun_at >= 60 * every.minutes
        return by_count or by_time or self._overdue

    def is_ready(self) -> bool:
        return self._saver.ready()

    def begin(self, engine: Engine, state: TrainState) -> None:
        """Copy the state and start uploading the copy. Training waits only for the copy."""
        self._begin_save(engine, state, StoredMemory())

    def commit(self) -> None:
        """Commit the uploaded checkpoint. Collective. Metrics are flushed first, so that a committed checkpoint has the
        records of all its steps. If the store is slow, the commit does not wait, and the records are written later."""
        self._commit_and_record(since=self._clock())

    def finish(self, engine: Engine, state: TrainState, carried: StoredMemory) -> None:
        """Commit `state`, unless it is committed already, and wait for the commit. `carried`: XLNet's memory that the
        next step needs.

        A run that has made no step saves nothing: its next start begins at step 0 again.

        Raises on all ranks:
            SaveFailed: if the store did not take the last save, but may recover.
            CheckpointError: if the last save failed otherwise, so that the steps since the previous one are not saved.
            Superseded: if a newer attempt has been claimed.
        """
        self._journal.report_activity(state.step, _SAVING)
        if self._saver.pending_step is not None:
            self._wait_and_commit(state.step)
        if state.step != (self._saver.last_step or 0):
            self._begin_save(engine, state, carried)
            outcome = self._wait_and_commit(state.step)
            if isinstance(outcome, FailedSave):
                raise self._save_error(outcome)
        self._finish_tidying(state.step)

    def close(self) -> None:
        """End the background threads. A save under way is abandoned."""
        self._saver.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _save_error(self, failed: FailedSave) -> SaveFailed | CheckpointError:
        if failed.transient:
            return SaveFailed(failed.step, self._saver.last_step or 0, failed.reason)
        return CheckpointError(
            f"the final checkpoint of step {failed.step} failed: {failed.reason}",
            remedy="repair the cause and run the same command again: it resumes from the last commit",
        )

    def _begin_save(self, engine: Engine, state: TrainState, carried: StoredMemory) -> None:
        self._begun_at, self._overdue = self._clock(), False
        fragments = chain(engine.fragments(), carried.fragments)
        whole = state.to_json() | self._extra.state()
        self._saver.begin(state.step, fragments, engine.shapes, whole, carried.shapes, own_kinds=engine.own_kinds)

    def _wait_and_commit(self, step: int) -> SaveOutcome:
        """Wait for the uploads of all ranks at `step`, and commit. Collective. A rank that waits for others reports
        their progress in its heartbeats, so that it does not count as stuck."""
        since = self._clock()
        self._saver.wait_for_all(lambda sent: self._journal.report_activity(step, _SAVING, sent))
        return self._commit_and_record(since)

    def _commit_and_record(self, since: float) -> SaveOutcome:
        self._journal.flush()
        outcome = self._saver.commit()
        self._record_outcome(outcome, self._clock() - since)
        return outcome

    def _record_outcome(self, outcome: SaveOutcome, waited: float) -> None:
        """Record the outcome of a save. `waited`: seconds that training waited for the commit; the event also counts
        the wait for the copy."""
        match outcome:
            case CommittedSave():
                self._journal.event(
                    "commit",
                    step=outcome.step,
                    bytes=outcome.bytes,
                    blocked=outcome.blocked_s + waited,
                    seconds=outcome.background_s,
                )
                if self._rank == 0:
                    self._start_tidying(self._extra.latest_rewind_step(outcome.step))
            case FailedSave():
                self._journal.event("commit_failed", step=outcome.step, reason=outcome.reason)
                self._journal.note(f"checkpoint of step {outcome.step} failed: {outcome.reason}")

    def _start_tidying(self, latest_rewind_step: int) -> None:
        """Start deleting expired checkpoints, on rank 0, while training continues. If the deletions find a newer
        attempt, the next commit raises Superseded."""
        self._wait_for_deletions()
        self._tidying = self._pool.submit(self._delete_expired, latest_rewind_step, self._proven)

    def _delete_expired(self, latest_rewind_step: int, proven: frozenset[CheckpointName]) -> DeletionReport:
        every = self._settings.keep_every.steps if self._settings.keep_every else None
        self._store.put_if_absent(COMMITTED_KEY, b"{}\n")
        return delete_expired(
            self._store,
            self._attempt,
            keep_last=self._settings.keep_last,
            keep_every=every,
            latest_rewind_step=latest_rewind_step,
            proven=proven,
        )

    def _wait_for_deletions(self) -> None:
        """Wait for the deletions. If they fail, the checkpoints stay until the next commit."""
        tidying, self._tidying = self._tidying, None
        try:
            if tidying is not None:
                self._proven = tidying.result().proven
        except (StoreError, CheckpointError) as error:
            self._journal.event("tidy_failed", reason=error.problem)

    def _finish_tidying(self, step: int) -> None:
        """Wait for the deletions, at most `_TIDY_TIMEOUT_S` seconds. Everything is committed, so the next start can
        do the rest."""
        if self._tidying is not None:
            self._journal.report_activity(step, _TIDYING)
            wait([self._tidying], timeout=_TIDY_TIMEOUT_S)
            if self._tidying.done():
                self._wait_for_deletions()
            else:
                self._journal.event("tidy_failed", reason=f"deletions took longer than {_TIDY_TIMEOUT_S:.0f} s")


_SLOW_COPIES = 2  # number of first copies that are not timed: each fills one of the two slots, whose pages are new


class MemoryCopies:
    """Copies one rank's part of the state to memory. The times of copies do not influence the results of training.

    Args:
        keeper: the keeper process of this rank's node; None makes no copies.
        extra: the part of the run whose state checkpoints hold in addition to the trainer's.
        resumed: the state that this start resumed from; None for a start from step 0.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        peers: Peers,
        *,
        keeper: Keeper | None,
        extra: ExtraState,
        journal: RankJournal,
        resumed: ResumePoint | None,
    ) -> None:
        self._settings: Recovery = run.recipe.recovery
        self._extra, self._journal = extra, journal
        self._first = peers.rank == 0
        self._attempt = attempt.number
        manifest = resumed.manifest if resumed is not None else None
        self._past, self._begun_at = (manifest.lineage, manifest.step) if manifest is not None else ((), 0)
        self._writer = None
        if keeper is not None and self._settings.memory_every != "never":
            self._writer = MemoryWriter(
                keeper,
                recipe=run.record.fingerprint,
                attempt=attempt.number,
                rank=peers.rank,
                world=peers.world,
            )
        self._last: int | None = None  # step of the last copy
        self._refused = False  # whether an event has recorded that the other node has no memory for copies
        self._ended_at, self._took, self._made = time.monotonic(), 0.0, 0  # last copy's end and seconds; their number

    def is_due(self, step: int) -> bool:
        """Return whether this rank agrees to copy the state after `step` steps. Rank 0 decides by settings and clock;
        the other ranks only report whether they can. Ranks that end with a save make no copy. Ranks that hand over
        (`EndAction`) always copy, and do not wait for the copy on another node, because no node is lost."""
        ending = self._journal.link.end_action
        if self._writer is None or self._writer.failure is not None or ending == "save":
            return False
        if ending == "hand over":
            return True
        if not self._writer.is_ready or not self._first:
            return self._writer.is_ready
        every = self._settings.memory_every
        if every == "auto":
            return time.monotonic() - self._ended_at >= self._took / COPY_TIME_SHARE
        return self._last is None or step - self._last >= int(every)

    def copy_state(self, engine: Engine, state: TrainState, carried: StoredMemory, since: float) -> int | None:
        """Copy the state; return the bytes of this rank's part, None if the machine has no memory for it. `since`:
        `time.monotonic` at which training began to wait for this copy."""
        assert self._writer is not None
        self._record_refusal()
        fragments = chain(engine.fragments(), carried.fragments)
        size = self._writer.write(state.step, fragments, self._common_description(engine, state, carried))
        self._last, self._ended_at = state.step, time.monotonic()
        self._made += 1
        if self._made > _SLOW_COPIES:
            self._took = self._ended_at - since
        if self._writer.failure is not None:
            self._journal.rank_event("memory_failed", step=state.step, reason=self._writer.failure)
        return size

    def _record_refusal(self) -> None:
        """Record, once, that the other node had no memory for a copy of this rank's part of the state."""
        if self._writer is None or self._refused or not self._writer.is_copy_refused:
            return
        self._refused = True
        reason = "the other node has no memory for copies of this rank's state: they are lost if this node is"
        self._journal.rank_event("memory_unshared", step=self._last, reason=reason)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _common_description(self, engine: Engine, state: TrainState, carried: StoredMemory) -> CommonDescription | None:
        """Return what rank 0's copy describes for the copies of all ranks; None on other ranks."""
        if not self._first:
            return None
        segments, records = self._journal.pending_lines()
        mine = LineageSegment(attempt=self._attempt, start=self._begun_at, stop=state.step)
        return CommonDescription(
            shapes=dict(engine.shapes),
            own_kinds=dict(engine.own_kinds),
            memory={name: tuple(shape) for name, shape in carried.shapes.items()},
            state=state.to_json() | self._extra.state(),
            lineage=(*self._past, mine),
            records=records,
            segments=segments,
        )
