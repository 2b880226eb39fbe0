"""The keeper of a node: a small Ray actor that holds open the memory into which the node's ranks copy their state, so
that it outlives them, and that holds copies of sets of other nodes (`checkpoints.memory`).

A keeper fetches sets from another keeper in chunks, through Ray. The rank writes no further set before the copy is made
or the keeper that makes it has died. The driver starts the keepers. They end with it, and the memory is free once the
ranks have ended, too. Importing this module does not load torch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypedDict, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from checkpoints.memory_slots import HEADER_BYTES, Slot, SlotDescription
from launcher.runtime.policies.recovery import copy_partners

_CHUNK_BYTES = 32 << 20  # bytes that are fetched at a time
_CHUNK_TIMEOUT_S = 60.0  # time limit for a chunk
_PING_TIMEOUT_S = 0.5

F = TypeVar("F", bound=Callable[..., Any])
# Ray's groups of threads, on which methods of the actor run.
_on_serving_thread: Callable[[F], F] = ray.method(concurrency_group="serving")
_on_copying_thread: Callable[[F], F] = ray.method(concurrency_group="copying")


class HeldSlot(TypedDict):
    """A complete set in a keeper's memory, as told to other processes.

    Attributes:
        node, pid, descriptor: the keeper's node and process, and the slot's file in it.
        description: `SlotDescription` as JSON.
    """

    node: str
    pid: int
    descriptor: int
    description: str


SlotLocations = tuple[int, Sequence[tuple[int, int]]]
"""Where the slots of a rank are: its process, and descriptor and inode of each."""


@dataclass
class _RankSlots:
    """The slots of one rank that this keeper holds open.

    Attributes:
        attempt: the rank's attempt.
        place: where they are.
        slots: those that it writes.
        before: those of the rank's earlier processes, needed until this one has completed two sets.
    """

    attempt: int
    place: SlotLocations
    slots: list[Slot]
    before: list[Slot]


class MemoryKeeper:
    """Holds the states of a node's ranks, and copies of other nodes' states, as a Ray actor."""

    def __init__(self) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._ranks: dict[int, _RankSlots] = {}
        self._copies: dict[int, list[Slot]] = {}  # copies of ranks on other nodes: the newest set first
        self._dropped = 0  # sets of attempts up to this one are not held

    def ping(self) -> None:
        """Answer, to show that the process lives."""

    def completed(self, rank: int, count: int, place: SlotLocations, partner: Any = None, *, attempt: int) -> None:
        """Note that a rank of this attempt has completed its set number `count` in its slots at `place`. If it is the
        second, all ranks have completed their first, and sets of attempts before are not needed. `partner`: the keeper
        that is to copy the set."""
        if attempt <= self._dropped:
            _close_slots(_open_slots(place) or [])
            return
        known = self._open_rank_slots(rank, place, attempt)
        if known is None:
            return
        if count >= 2 and known.before:
            for slot in known.before:
                slot.close()
            known.before = []
        if partner is not None:
            slots = known.slots
            copied = partner.copy.remote(ray.get_runtime_context().current_actor, rank, attempt)
            copied.future().add_done_callback(partial(_end_copy_wait, slots))

    def _open_rank_slots(self, rank: int, place: SlotLocations, attempt: int) -> _RankSlots | None:
        """Return the slots of a rank, opened if they are not; None if its process has ended."""
        known = self._ranks.get(rank)
        if known is not None and known.place == place:
            return known
        slots = _open_slots(place)
        if slots is None:
            return None
        before = [*known.before, *known.slots] if known is not None else []
        self._ranks[rank] = _RankSlots(attempt, place, slots, before)
        return self._ranks[rank]

    def drop(self, attempt: int) -> None:
        """Drop the sets of the ranks of this node, of attempts up to this one, and let the ranks know."""
        self._dropped = max(self._dropped, attempt)
        for rank in [rank for rank, known in self._ranks.items() if known.attempt <= attempt]:
            known = self._ranks.pop(rank)
            _close_slots([*known.slots, *known.before])

    @_on_copying_thread
    def drop_copies(self, attempt: int) -> None:
        """Drop the copies of sets of other nodes, of attempts up to this one. Called after `drop`, so no copy of such
        an attempt is made later."""
        for kept in self._copies.values():
            for slot in list(kept):
                about = slot.read_description()
                if about is None or about.attempt <= attempt:
                    kept.remove(slot)
                    slot.close()

    def offers(self) -> list[HeldSlot]:
        """Return all complete sets that are here."""
        slots = (*self._own_slots(), *chain.from_iterable(self._copies.values()))
        told = ((slot.descriptor, slot.read_description()) for slot in slots)
        return [
            HeldSlot(node=self._node, pid=os.getpid(), descriptor=descriptor, description=about.model_dump_json())
            for descriptor, about in told
            if about is not None
        ]

    @_on_serving_thread
    def read(self, descriptor: int, start: int, stop: int) -> bytes:
        """Return bytes of a slot's file. Raises KeyError if there is no such slot any more."""
        return self._slot(descriptor).data[start:stop]

    @_on_serving_thread
    def newest_set_for_copy(self, rank: int) -> tuple[int, tuple[int, bytes], int] | None:
        """Return file, identity and used bytes of the newest set of a rank; None if there is none."""
        known = self._ranks.get(rank)
        newest = max(known.slots, key=lambda slot: slot.seal) if known is not None else None
        if newest is None or not newest.seal:
            return None
        return newest.descriptor, newest.identity, newest.used_bytes

    @_on_serving_thread
    def identity(self, descriptor: int) -> tuple[int, bytes]:
        """Return the identity of the set in a slot, which differs if the rank has begun the next one in it."""
        return self._slot(descriptor).identity

    @_on_copying_thread
    def copy(self, source: Any, rank: int, attempt: int) -> bool:
        """Fetch the newest set of a rank from the keeper `source`. A set that is overwritten meanwhile is
        discarded, as is one whose keeper's node is lost. Return False if this node has no memory for the set."""
        if attempt <= self._dropped:
            return True
        with suppress(RayError, GetTimeoutError, KeyError):
            lent = ray.get(source.newest_set_for_copy.remote(rank), timeout=_CHUNK_TIMEOUT_S)
            kept = self._copies.setdefault(rank, [])
            if lent is None or (kept and kept[0].identity == lent[1]):
                return True
            descriptor, identity, used = lent
            try:
                target = self._target(kept, used)
            except OSError:
                return False
            if _fetch_set(source, descriptor, identity, target=target, used_bytes=used):
                kept.insert(0, target)
        return True

    def _target(self, kept: list[Slot], used: int) -> Slot:
        if len(kept) == 2:
            oldest = kept.pop()
            oldest.begin_set()
            if oldest.fits(used - HEADER_BYTES, 0):
                return oldest
            oldest.close()
        return Slot.create(used, 0, free_bytes=max(1, len(self._ranks)) * used)

    def _slot(self, descriptor: int) -> Slot:
        slots = (*self._own_slots(), *chain.from_iterable(self._copies.values()))
        return {slot.descriptor: slot for slot in slots}[descriptor]

    def _own_slots(self) -> list[Slot]:
        return [slot for rank in self._ranks.values() for slot in (*rank.slots, *rank.before)]


def _fetch_set(source: Any, descriptor: int, identity: tuple[int, bytes], *, target: Slot, used_bytes: int) -> bool:
    """Copy the `used_bytes` bytes of a slot of the keeper `source` to `target`. Return whether they are of the set
    with this identity; if not, `target` is closed. Raises RayError, GetTimeoutError and KeyError, then too."""
    whole = False
    try:
        for start in range(8, used_bytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, used_bytes)
            target.data[start:stop] = ray.get(source.read.remote(descriptor, start, stop), timeout=_CHUNK_TIMEOUT_S)
        whole = bool(ray.get(source.identity.remote(descriptor), timeout=_CHUNK_TIMEOUT_S) == identity)
        if whole:
            target.mark_copy_awaited(False)
            target.complete_copied_set(identity[0])
    finally:
        if not whole:
            target.close()
    return whole


def _open_slots(place: SlotLocations) -> list[Slot] | None:
    """Return the slots at `place`; None if their process has ended."""
    pid, files = place
    try:
        return [Slot.open_from_process(pid, descriptor) for descriptor, _ in files]
    except OSError:
        return None


def _close_slots(slots: Sequence[Slot]) -> None:
    """Close slots, and let the rank that writes them know."""
    for slot in slots:
        slot.mark_sets_dropped()
        slot.close()


def _end_copy_wait(slots: Sequence[Slot], copied: "Future[bool]") -> None:
    """Let a rank write its next set: the partner has a copy of the newest, has no memory for it, or has died."""
    refused = copied.exception() is None and not copied.result()
    for slot in slots:
        with suppress(ValueError):  # the rank has ended, and its slots are closed
            if refused and slot.awaits_copy:
                slot.mark_copy_refused()
            else:
                slot.mark_copy_awaited(False)


def ensure_keepers(keeper_by_node: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return a keeper for each of `nodes`: the one in `keeper_by_node`, if its process lives, or else a new
    one."""
    pings = {node: keeper_by_node[node].ping.remote() for node in nodes if node in keeper_by_node}
    calls = list(pings.values())
    answered = set(ray.wait(calls, num_returns=len(calls), timeout=_PING_TIMEOUT_S)[0]) if calls else set()
    dead = {node for node, call in pings.items() if call in answered and not _ping_succeeded(call)}
    # One that does not answer is still starting, or its machine is busy.
    return {node: keeper_by_node[node] if node in pings and node not in dead else _start_keeper(node) for node in nodes}


def _ping_succeeded(ping: Any) -> bool:
    try:
        ray.get(ping)
    except RayError:
        return False
    return True


def _start_keeper(node: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    threads = {"serving": 2, "copying": 1}
    # One that dies is started again by Ray, and holds again what the ranks tell it.
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=threads)(MemoryKeeper)
    return actor.options(scheduling_strategy=strategy).remote()


_OFFERS_TIMEOUT_S = 3.0  # time limit for keepers to tell what they hold: those of lost nodes do not answer


class StateKeepersClient:
    """A rank's client of the keepers on all nodes: hands them this rank's copies of its state, finds and reads copies.

    Args:
        keepers: the keeper of each node, by the node's id.
        nodes: the node of each rank. The keeper of another node copies this rank's sets, if there is one.
        rank: this rank.
        attempt: its attempt.
        remembers: whether keepers may hold sets. If not, they are not asked, since they are still starting.
    """

    def __init__(
        self,
        keepers: Mapping[str, Any],
        nodes: Sequence[str],
        rank: int,
        *,
        attempt: int,
        remembers: bool,
    ) -> None:
        self._keepers, self._node, self._remembers = keepers, nodes[rank], remembers
        partner = nodes[copy_partners(nodes)[rank]]
        self._partner = keepers.get(partner) if partner != self._node else None
        self._attempt = attempt
        self.shares, self.ranks = self._partner is not None, list(nodes).count(self._node)

    def note_completed_set(self, rank: int, count: int, slots: Sequence[Slot]) -> None:
        place: SlotLocations = (os.getpid(), tuple((slot.descriptor, slot.inode) for slot in slots))
        self._keepers[self._node].completed.remote(rank, count, place, self._partner, attempt=self._attempt)
        if rank == 0 and count == 2:  # earlier groups may have had other ranks on any node
            self._drop_sets_until(self._attempt - 1)

    def drop_all_sets(self) -> None:
        self._drop_sets_until(self._attempt)

    def _drop_sets_until(self, attempt: int) -> None:
        for keeper in self._keepers.values():
            keeper.drop.remote(attempt)
            keeper.drop_copies.remote(attempt)

    def list_sets(self) -> list[HeldSlot]:
        """Return the sets that all keepers hold which answer in time, those of this node first."""
        calls = [keeper.offers.remote() for keeper in self._keepers.values() if self._remembers]
        found: list[HeldSlot] = []
        for call in ray.wait(calls, num_returns=len(calls), timeout=_OFFERS_TIMEOUT_S)[0] if calls else ():
            with suppress(RayError):
                found += ray.get(call)
        return sorted(found, key=lambda held: held["node"] != self._node)

    def describe(self, held: HeldSlot) -> SlotDescription:
        return SlotDescription.model_validate_json(held["description"])

    def open_set(self, held: HeldSlot) -> Callable[[int, int], Any]:
        """Return the function that reads bytes of a set's body, by their offsets. That function raises RayError if the
        keeper of another node is gone. Raises OSError if the keeper of this node is."""
        if held["node"] == self._node:
            data = Slot.open_from_process(held["pid"], held["descriptor"]).map_and_close()
            return lambda start, stop: data[HEADER_BYTES + start : HEADER_BYTES + stop]
        keeper = self._keepers[held["node"]]

        def fetch_range(start: int, stop: int) -> bytearray:
            parts = range(start, stop, _CHUNK_BYTES)
            chunk_ranges = [(HEADER_BYTES + at, HEADER_BYTES + min(at + _CHUNK_BYTES, stop)) for at in parts]
            calls = [keeper.read.remote(held["descriptor"], *part) for part in chunk_ranges]
            return bytearray(b"".join(ray.get(calls, timeout=_CHUNK_TIMEOUT_S)))

        return fetch_range
