"""Checkpoints in memory: the ranks copy their state to the memory of their nodes, in the form of a checkpoint, so that
a restart need not go back to the last commit in the store.

Every rank writes its part of the state (a set) to slots of its own (`checkpoints.memory_slots`). It has two and writes
them in turn, so one set stays complete while the next is written. The sets of all ranks after one step are a
checkpoint: a restart may begin from it, with any number of ranks. It is no commit: it is not listed, retained or
exported, and it ends with the command that trains.

A keeper process on each node holds the slots open. So a set outlives its rank. If there are other nodes, the keeper of
another node copies it, so it outlives its node. No rank begins a set before the newest sets of all ranks are copied. So
whichever node is lost, at any moment, the sets of one step are left of all ranks: of the newest, or of the one before.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float32
from torch import Tensor

from checkpoints.layout import F32_BYTES, CheckpointManifest, problems_besides_files
from checkpoints.memory_slots import HEADER_BYTES, CommonDescription, Slot, SlotDescription
from checkpoints.save import copy_to_body, plan_body
from encoder_core.train.zero_state import Fragment

_KEEPER_TIMEOUT_S = 60.0  # longest time that a live keeper takes to copy a set
ReadBytes = Callable[[int, int], Any]
"""Function from the first and the last offset in a set's body to a buffer with the bytes between."""


class Keeper(Protocol):
    """The rank's side of the keeper process of its node. No call waits, and none raises.

    Attributes:
        shares: whether the keeper of another node copies each set.
        ranks: number of ranks on this node.
    """

    shares: bool
    ranks: int

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None:
        """Note that the rank has completed its set number `count`, from 1, in one of these slots of this process. All
        slots are named each time, because a restarted keeper knows none."""
        ...

    def drop_all_sets(self) -> None:
        """Have all keepers drop all sets, since there is no memory for them: no rank writes another one."""
        ...


class MemoryWriter:
    """The writer of one rank's sets.

    Args:
        recipe: fingerprint of the run's identity.
        attempt, rank, world: the attempt, and this rank of how many.

    Attributes:
        failure: why no sets are written any more: the machine has no memory for the slots, or another rank's has
            none. None if they are.
    """

    def __init__(self, keeper: Keeper, *, recipe: str, attempt: int, rank: int, world: int) -> None:
        self._keeper, self._recipe, self._attempt = keeper, recipe, attempt
        self._rank, self._world = rank, world
        self._slots: list[Slot] = []
        self._count = 0
        self._copied_at = time.monotonic()  # last time at which every set had been copied
        self.failure: str | None = None

    @property
    def is_copy_refused(self) -> bool:
        """Whether the node that is to have copies of the sets had no memory for the newest."""
        return any(slot.is_copy_refused for slot in self._slots)

    @property
    def is_ready(self) -> bool:
        """Whether the next set can be written: another node has a copy of the newest, if one is to have it. A keeper
        that takes longer than `_KEEPER_TIMEOUT_S` seconds has died; if not, it notices that its copy is torn."""
        now = time.monotonic()
        if any(slot.are_sets_dropped for slot in self._slots):
            self.failure = "another rank's machine has no memory for copies of the state"
            self.close()
        if not any(slot.awaits_copy for slot in self._slots):
            self._copied_at = now
        return self.failure is None and (self._copied_at == now or now - self._copied_at > _KEEPER_TIMEOUT_S)

    def write(self, step: int, fragments: Iterable[Fragment], common: CommonDescription | None) -> int | None:
        """Copy this rank's fragments of the state after `step` steps; return their bytes. The caller may change them
        afterwards.

        `common`: given on rank 0. If the machine has no memory for the copies, `failure` is set, nothing is written,
        and None is returned.
        """
        held = list(fragments)
        pieces, body = plan_body(held, self._rank)
        record = SlotDescription(
            recipe=self._recipe,
            attempt=self._attempt,
            step=step,
            rank=self._rank,
            world=self._world,
            pieces=pieces,
            common=common,
        )
        description = record.model_dump_json().encode()
        try:
            slot = self._next_slot(body, len(description))
        except OSError as error:
            self.failure = error.strerror or str(error)
            self.close()
            self._keeper.drop_all_sets()
            return None
        slot.begin_set()
        copy_to_body(
            held, torch.frombuffer(slot.data, dtype=torch.float32, offset=HEADER_BYTES, count=body // F32_BYTES)
        )
        slot.complete_set(step, body, description, needs_copy=self._keeper.shares)
        self._count += 1
        self._keeper.note_completed_set(self._rank, self._count, self._slots)
        return body

    def close(self) -> None:
        """Close the slots in this process. The keeper has them open."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _next_slot(self, body_bytes: int, description_bytes: int) -> Slot:
        """Return the slot for the next set. Both slots are replaced if they are too small: longer rows of a later phase
        enlarge XLNet's cache, and more step records may wait for the store. Memory that the ranks of this node need
        for a save stays free."""
        if not self._slots or not self._slots[0].fits(body_bytes, description_bytes):
            self.close()
            self._count, left = 0, self._keeper.ranks * body_bytes
            for _ in range(2):
                self._slots.append(Slot.create(body_bytes, 2 * description_bytes, free_bytes=left))
        return self._slots[self._count % 2]


@dataclass(frozen=True)
class SetOffer:
    """A set that some keeper holds. `place`: what its reader needs to find it."""

    description: SlotDescription
    place: Any


def newest_sets(offers: Iterable[SetOffer], recipe: str) -> list[SetOffer] | None:
    """Return the sets of the newest step of which the set of every rank is offered, in rank order; None if there is no
    such step. Sets of another recipe are passed over."""
    found: dict[tuple[int, int, int], dict[int, SetOffer]] = {}
    for offer in offers:
        state = offer.description
        if state.recipe == recipe:
            found.setdefault((state.attempt, state.step, state.world), {}).setdefault(state.rank, offer)
    for (_, _, world), sets in sorted(found.items(), reverse=True):
        whole = [sets[rank] for rank in sorted(sets)]
        if len(whole) == world and _covers_all_elements([offer.description for offer in whole]):
            return whole
    return None


def _covers_all_elements(sets: Sequence[SlotDescription]) -> bool:
    return sets[0].common is not None and not problems_besides_files(manifest_from_sets(sets))


def manifest_from_sets(sets: Sequence[SlotDescription]) -> CheckpointManifest:
    """Return the manifest of a checkpoint in memory, which names no files: a piece's `file` is the rank whose set holds
    it, and offsets are those in the set's body."""
    first = sets[0]
    assert first.common is not None
    pieces = [piece for each in sets for piece in each.pieces]
    apart = first.common.memory.keys() | first.common.own_kinds.keys()
    kinds = {kind for piece in pieces if piece.name not in apart for kind in piece.offsets}
    return CheckpointManifest(
        step=first.step,
        attempt=first.attempt,
        world_size=len(sets),
        shapes=first.common.shapes,
        kinds=tuple(sorted(kinds)),
        own_kinds=first.common.own_kinds,
        memory=first.common.memory,
        files=(),
        pieces=tuple(pieces),
        state=first.common.state,
        lineage=first.common.lineage,
        versions={},
        created=time.time(),
    )


class MemoryReader:
    """A reader of ranges of a checkpoint in memory, as `checkpoints.load.CheckpointReader` is one of a commit.

    Args:
        parts: functions that read the set of each rank.
    """

    def __init__(self, manifest: CheckpointManifest, parts: Mapping[int, ReadBytes]) -> None:
        self.manifest, self._parts = manifest, parts

    def read(self, name: str, kind: str, start: int, stop: int) -> Float32[Tensor, " length"]:
        """Return elements [start, stop) of the flattened parameter or memory, float32 on the CPU."""
        result = torch.empty(stop - start, dtype=torch.float32)
        for piece in self.manifest.pieces_by_name[name]:
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin < end:
                at = piece.offsets[kind] + (begin - piece.start) * F32_BYTES
                data = self._parts[piece.file](at, at + (end - begin) * F32_BYTES)
                result[begin - start : end - start] = torch.frombuffer(data, dtype=torch.float32)
        return result
