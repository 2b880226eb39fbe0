"""Where a group of ranks resumes: from the newest state in the memory of the nodes, or from the newest good checkpoint
in the store, whichever is newer; and from which step on it leaves removed documents out. All ranks agree on it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import TypeAdapter

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers, broadcast_or_raise
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import Rewind, is_on_lineage, list_committed, read_rewinds
from checkpoints.load import CheckpointReader
from checkpoints.memory import Keeper, MemoryReader, ReadBytes, SetOffer, manifest_from_sets, newest_sets
from checkpoints.memory_slots import CommonDescription, SlotDescription
from checkpoints.verify import find_newest_good
from encoder_core.optim.average import AVERAGE
from launcher.errors import RunError
from launcher.runtime.rank.journal import SupervisorLink
from launcher.runtime.run.following import unread_segments
from launcher.runtime.run.record import COMMITTED_KEY, Run
from launcher.runtime.run.removals import RemovalHistory, RemovalRecord, read_removals, write_removals
from launcher.runtime.run.segments import METRICS


class MemorySets(Keeper, Protocol):
    """A rank's access to the sets in the memory of the nodes; a set is one rank's copy of its part of the state
    (`launcher.runtime.cluster.memory_keeper.StateKeepersClient`)."""

    def list_sets(self) -> list[Any]:
        """Return all sets in memory, as objects that `open_set` and `describe` accept on any rank."""
        ...

    def describe(self, held: Any) -> SlotDescription:
        """Return the description of a set that `list_sets` returned."""
        ...

    def open_set(self, held: Any) -> ReadBytes: ...


@dataclass(frozen=True)
class ResumePoint:
    """The state that a group of ranks resumes from.

    Attributes:
        manifest: description of the state, in the form of a checkpoint's manifest.
        open: function that returns a reader of the state's tensors, as a context manager.
        stored: step of the newest commit in the store that belongs to the state's history; None if there is none.
        passed_over: one line for each newer checkpoint in the store that is damaged.
        memory: description that all sets share, if the state comes from memory; None if it comes from the store.
        close: function that releases the reader's memory. Call it after the last read.
    """

    manifest: CheckpointManifest
    open: Callable[[], AbstractContextManager[CheckpointReader | MemoryReader]]
    stored: int | None
    passed_over: tuple[str, ...] = ()
    memory: CommonDescription | None = None
    close: Callable[[], None] = lambda: None

    @property
    def averaged(self) -> bool:
        """Whether the state holds an average of the weights."""
        return AVERAGE in self.manifest.kinds


def find_resume_point(run: Run, peers: Peers, link: SupervisorLink, memory: MemorySets | None) -> ResumePoint | None:
    """Return the state that all ranks resume from; None for a run that has made no checkpoint yet. Collective.

    Raises RunError if the run had checkpoints and has lost them, so that it does not start again from step 0.
    """
    point = (_resume_from_memory(run, peers, memory) if memory is not None else None) or _resume_from_store(run, peers)
    if point is None and run.store.size(COMMITTED_KEY) is not None:
        raise RunError(
            f"{run.uri} had checkpoints, but none is left",
            remedy="restore its checkpoints/ folder from a copy, or start a new run",
        )
    if point is not None:
        link.beat(point.manifest.step, "loading")
    return point


def _resume_from_store(run: Run, peers: Peers) -> ResumePoint | None:
    good = find_newest_good(run.store, peers)
    if good is None:
        return None
    if peers.rank == 0:
        run.store.put_if_absent(COMMITTED_KEY, b"{}\n")
    manifest = good.manifest
    return ResumePoint(manifest, lambda: CheckpointReader(run.store, manifest), manifest.step, good.passed_over)


_SETS_ADAPTER = TypeAdapter(list[Any])  # JSON of the states in memory that rank 0 chose, one for each rank
_STEP_ADAPTER = TypeAdapter(int | None)  # JSON of a checkpoint's step; None if there is no checkpoint


def _resume_from_memory(run: Run, peers: Peers, memory: MemorySets) -> ResumePoint | None:
    """Return the newest state in memory that is newer than every commit and not abandoned by a rewind; None if there is
    none, or if some rank cannot open its sets."""
    sets = broadcast_or_raise(peers, lambda: _newest_offered_sets(run, memory), _SETS_ADAPTER)
    if not sets:
        return None
    parts: dict[int, ReadBytes] = {}
    with suppress(OSError):  # raised if a keeper has died since
        parts = {rank: memory.open_set(each) for rank, each in enumerate(sets)}
    if not all(peers.all_gather(bool(parts))):
        return None
    descriptions = [memory.describe(each) for each in sets]
    reader = MemoryReader(manifest_from_sets(descriptions), parts)
    stored = broadcast_or_raise(peers, lambda: _newest_step_on_lineage(run, reader.manifest), _STEP_ADAPTER)
    return ResumePoint(
        reader.manifest, lambda: nullcontext(reader), stored, memory=descriptions[0].common, close=parts.clear
    )


def _newest_step_on_lineage(run: Run, manifest: CheckpointManifest) -> int | None:
    """Return the step of the newest checkpoint that led to the loaded state; None if there is none. Newer checkpoints
    were skipped as damaged: their steps are trained and saved again, so they do not count."""
    marks = list_committed(run.store)
    return next((mark.step for mark in marks if is_on_lineage(manifest.lineage, mark)), None)


def _newest_offered_sets(run: Run, memory: MemorySets) -> list[Any]:
    """Return the sets of the newest state in memory if it is newer than every commit, else none. For rank 0 only."""
    rewinds, marks = read_rewinds(run.store), list_committed(run.store)
    stored = marks[0] if marks else None
    offers = [SetOffer(memory.describe(held), held) for held in memory.list_sets()]
    usable = [offer for offer in offers if _is_usable(offer, stored, rewinds)]
    newest = newest_sets(usable, run.record.fingerprint)
    return [offer.place for offer in newest or []]


def _is_usable(offer: SetOffer, stored: CheckpointName | None, rewinds: Sequence[Rewind]) -> bool:
    mark = CheckpointName(offer.description.attempt, offer.description.step)
    return (stored is None or mark > stored) and all(mark.attempt > rewind.attempt for rewind in rewinds)


def missing_records(run: Run, attempt: int, memory: CommonDescription) -> list[str]:
    """Return the step records in `memory` that `attempt` did not write to the store. Raises StoreError.

    The attempt's stored segments from number `memory.segments` on hold the first of these records."""
    written = unread_segments(run.store, METRICS, attempt, memory.segments - 1, damage=[])
    return list(memory.records[sum(len(data.splitlines()) for _, _, data in written) :])


_RECORDS_ADAPTER = TypeAdapter(tuple[RemovalRecord, ...])  # converts all removal records of the run


def agree_on_removals(run: Run, attempt: Attempt, step: int, peers: Peers) -> tuple[Run, RemovalRecord | None]:
    """Return `run` with the documents to leave out from `step` on, and the removal record of this attempt; None if it
    needs none. Rank 0 decides and writes for all ranks.

    Raises:
        Superseded: a newer attempt has been claimed.
        DamagedCheckpoint, StoreError: as `read_removals`.
    """

    def decide_removals() -> tuple[RemovalRecord, ...]:
        records = read_removals(run.store)
        wanted = dict(run.removals)
        if dict(RemovalHistory(run.record.inputs.removals, records).states_at(step)) == wanted:
            return records
        attempt.ensure_current()
        new = RemovalRecord(step=step, attempt=attempt.number, states=wanted)
        write_removals(run.store, len(records) + 1, new)
        return (*records, new)

    records = broadcast_or_raise(peers, decide_removals, _RECORDS_ADAPTER)
    added = records[-1] if records and records[-1].attempt == attempt.number else None
    return replace(run, left_out=records), added
