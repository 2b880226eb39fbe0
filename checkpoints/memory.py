"""Checkpoints in memory: the ranks copy their state to the memory of their nodes, in the form of a checkpoint, so that
a restart need not go back to the last checkpoint in the store.

Every rank writes its part of the state (a set) to slots of its own (`checkpoints.memory_slots`). It has two and writes
them in turn, so one set stays complete while the next is written. The sets of all ranks after one step are a
checkpoint: a restart may begin from it, with any number of ranks. It is not in the store: it is not listed, retained or
exported, and it ends with the command that trains.

A keeper process on each node holds the slots open. So a set outlives its rank. If there are other nodes, the keeper of
another node copies it, so it outlives its node. No rank begins a set before the newest sets of all ranks are copied. So
whichever node is lost, at any moment, all ranks' sets of one step remain: of the newest step or of the one before.
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

_KEEPER_TIMEOUT_S = 60.0  # longest time in which a live keeper copies a saved state to its peer
ReadBytes = Callable[[int, int], Any]
"""Function from the first and the last offset in a set's body to a buffer with the bytes between."""


class Keeper(Protocol):
    """A rank's connection to the keeper process of its node. No method waits or raises.

    Attributes:
        shares: whether the keeper of another node copies each set.
        ranks: number of ranks on this node.
    """

    shares: bool
    ranks: int

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None:
        """Tell the keeper that the rank has completed set number `count` (from 1) in one of `slots`. Every call passes
        all slots of the rank, because a restarted keeper knows none."""
        ...

    def drop_all_sets(self) -> None:
        """Make all keepers drop all sets for lack of memory. After that no rank writes a set."""
        ...


class MemoryWriter:
    """The writer of one rank's sets (copies of its part of the training state in memory).

    Args:
        recipe: fingerprint of the run's identity.
        attempt, rank, world: numbers of the attempt and of this rank, and the number of ranks.

    Attributes:
        failure: why no more sets are written: this machine, or another rank's, has no memory for the slots. None while
            sets are written.
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
        """Whether the node that should copy the sets had no memory for the newest one."""
        return any(slot.is_copy_refused for slot in self._slots)

    @property
    def is_ready(self) -> bool:
        """Whether the next set may be written: another node has copied the newest one, or need not. A keeper that takes
        longer than `_KEEPER_TIMEOUT_S` seconds counts as dead; if it is not, it notices that its copy is torn."""
        now = time.monotonic()
        if any(slot.are_sets_dropped for slot in self._slots):
            self.failure = "another rank's machine has no memory for copies of the state"
            self.close()
        if not any(slot.awaits_copy for slot in self._slots):
            self._copied_at = now
        return self.failure is None and (self._copied_at == now or now - self._copied_at > _KEEPER_TIMEOUT_S)

    def write(self, step: int, fragments: Iterable[Fragment], common: CommonDescription | None) -> int | None:
        """Copy this rank's fragments of the state after `step` steps; return the number of bytes. The caller may change
        the fragments afterwards.

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
        """Close the slots in this process. The keeper still holds them open."""
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _next_slot(self, body_bytes: int, description_bytes: int) -> Slot:
        """Return the slot for the next set. Both slots are replaced if they are too small: longer rows of a later phase
        enlarge XLNet's cache, and more step records may wait for the store. The memory that this node's ranks need for
        a save is left free."""
        if not self._slots or not self._slots[0].fits(body_bytes, description_bytes):
            self.close()
            self._count, left = 0, self._keeper.ranks * body_bytes
            for _ in range(2):
                self._slots.append(Slot.create(body_bytes, 2 * description_bytes, free_bytes=left))
        return self._slots[self._count % 2]


@dataclass(frozen=True)
class SetOffer:
    """A set that a keeper offers to a restart. `place`: tells the set's reader where it is."""

    description: SlotDescription
    place: Any


def newest_sets(offers: Iterable[SetOffer], recipe: str) -> list[SetOffer] | None:
    """Return the sets of the newest step for which every rank's set is offered, in rank order; None if there is no such
    step. Sets of another recipe are ignored."""
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
    """Reads ranges of a checkpoint in memory, as `checkpoints.load.CheckpointReader` reads those of a stored one.

    Args:
        parts: for each rank, the function that reads bytes of its set.
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
