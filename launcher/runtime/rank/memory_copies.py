"""Decides when the ranks copy their state to the memory of their nodes (`checkpoints.memory`), and does it."""

import time
from itertools import chain

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers
from checkpoints.layout import LineageSegment
from checkpoints.memory import Keeper, MemoryWriter
from checkpoints.memory_slots import CommonDescription
from encoder_core.train.engine import Engine
from encoder_core.train.state import TrainState
from encoder_core.train.xlnet_memory import StoredMemory
from launcher.runtime.policies.recovery import COPY_TIME_SHARE, Recovery
from launcher.runtime.rank.checkpointing import ExtraState
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.resume import ResumePoint
from launcher.runtime.run.record import Run

_SLOW_COPIES = 2  # the first copies, one to each slot, which are slow because their pages are new


class MemoryCopies:
    """One rank's part in copies of the state in memory. Their times do not influence the results of training.

    Args:
        keeper: the keeper of this rank's node; None makes no copies.
        extra: the part of the run whose state checkpoints hold beside the trainer's.
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
        self._refused = False  # whether it is on record that the other node has no memory for copies
        self._ended_at, self._took, self._made = time.monotonic(), 0.0, 0

    def due(self, step: int) -> bool:
        """Return whether this rank is for a copy of the state after `step` steps. Rank 0's settings and clock count;
        the other ranks only say whether they can. If ranks end to save the state, no rank copies it. If they end to
        hand over to others, no node is lost, and the copy need not wait for another node."""
        ending = self._journal.link.ends
        if self._writer is None or self._writer.failure is not None or ending == "save":
            return False
        if ending == "hand over":
            return True
        if not self._writer.ready or not self._first:
            return self._writer.ready
        every = self._settings.memory_every
        if every == "auto":
            return time.monotonic() - self._ended_at >= self._took / COPY_TIME_SHARE
        return self._last is None or step - self._last >= int(every)

    def keep(self, engine: Engine, state: TrainState, carried: StoredMemory, since: float) -> int | None:
        """Copy the state; return the bytes of this rank's part, None if the machine has no memory for it. `since`: time
        by the clock at which training began to wait for this copy."""
        assert self._writer is not None
        self._record_refusal()
        fragments = chain(engine.fragments(), carried.fragments)
        size = self._writer.write(state.step, fragments, self._common(engine, state, carried))
        self._last, self._ended_at = state.step, time.monotonic()
        self._made += 1
        if self._made > _SLOW_COPIES:
            self._took = self._ended_at - since
        if self._writer.failure is not None:
            self._journal.rank_event("memory_failed", step=state.step, reason=self._writer.failure)
        return size

    def _record_refusal(self) -> None:
        """Record, once, that the other node had no memory for the copy of the last set."""
        if self._writer is None or self._refused or not self._writer.copy_refused:
            return
        self._refused = True
        reason = (
            "the other node has no memory for copies of this rank's state: if this node is lost, so are they"
        )
        self._journal.rank_event("memory_unshared", step=self._last, reason=reason)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _common(self, engine: Engine, state: TrainState, carried: StoredMemory) -> CommonDescription | None:
        if not self._first:
            return None
        segments, records = self._journal.pending()
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
