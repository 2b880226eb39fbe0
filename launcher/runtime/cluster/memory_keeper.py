"""The memory keeper of a node: a small Ray actor that keeps in-memory copies of training state alive when ranks die.

Each rank copies its state into memory files: one such copy is a set, and its file is a slot
(`checkpoints.memory_slots`). The keeper holds the slots open. It also holds copies of other nodes' sets, which it
fetches from their keepers in chunks, through Ray. A rank writes its next set only after its newest set was copied, or
the keeper that copies it has died. The driver starts the keepers, and they end with it. Importing this module does not
load torch.
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

_CHUNK_BYTES = 32 << 20  # bytes of one request to another keeper
_CHUNK_TIMEOUT_S = 60.0  # time limit for one request
_PING_TIMEOUT_S = 0.5

F = TypeVar("F", bound=Callable[..., Any])
# Decorators of the actor's methods: the group of Ray threads that runs the method.
_on_serving_thread: Callable[[F], F] = ray.method(concurrency_group="serving")
_on_copying_thread: Callable[[F], F] = ray.method(concurrency_group="copying")


class HeldSlot(TypedDict):
    """Where other processes find a complete set that a keeper holds.

    Attributes:
        node, pid, descriptor: id of the keeper's node, its process id, and its file descriptor of the slot.
        description: `SlotDescription` as JSON.
    """

    node: str
    pid: int
    descriptor: int
    description: str


SlotLocations = tuple[int, Sequence[tuple[int, int]]]
"""The slots of a rank: its process id, and file descriptor and inode of each slot."""


@dataclass
class _RankSlots:
    """The slots (memory files, one set each) of one rank that this keeper holds open.

    Attributes:
        attempt: number of the attempt in which the rank trains.
        place: location of `slots`.
        slots: the slots into which the rank writes now.
        before: slots of the rank's earlier processes, needed until the present process has completed two sets.
    """

    attempt: int
    place: SlotLocations
    slots: list[Slot]
    before: list[Slot]


class MemoryKeeper:
    """The Ray actor that holds the sets of a node's ranks, and copies of other nodes' sets."""

    def __init__(self) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._ranks: dict[int, _RankSlots] = {}
        self._copies: dict[int, list[Slot]] = {}  # copied sets of ranks on other nodes, the newest first
        self._dropped = 0  # number of the newest attempt whose sets were dropped

    def ping(self) -> None:
        """Do nothing: an answer shows that the process lives."""

    def completed(self, rank: int, count: int, place: SlotLocations, partner: Any = None, *, attempt: int) -> None:
        """Open the slots at `place`, in which a rank has completed its set number `count`, and have `partner` copy the
        set. A second set means that all ranks have a first one, so slots of the rank's earlier processes are closed.

        `partner`: keeper of another node; None if there is none."""
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
        """Open the slots of a rank unless they are open, and return them; None if the rank's process has ended."""
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
        """Drop the sets that this node's ranks wrote in `attempt` or an earlier attempt, and mark them as dropped."""
        self._dropped = max(self._dropped, attempt)
        for rank in [rank for rank, known in self._ranks.items() if known.attempt <= attempt]:
            known = self._ranks.pop(rank)
            _close_slots([*known.slots, *known.before])

    @_on_copying_thread
    def drop_copies(self, attempt: int) -> None:
        """Drop the copied sets of `attempt` and earlier attempts. Call `drop` first, so that no such set is copied
        later."""
        for kept in self._copies.values():
            for slot in list(kept):
                about = slot.read_description()
                if about is None or about.attempt <= attempt:
                    kept.remove(slot)
                    slot.close()

    def offers(self) -> list[HeldSlot]:
        """Return all complete sets that this keeper holds."""
        slots = (*self._own_slots(), *chain.from_iterable(self._copies.values()))
        told = ((slot.descriptor, slot.read_description()) for slot in slots)
        return [
            HeldSlot(node=self._node, pid=os.getpid(), descriptor=descriptor, description=about.model_dump_json())
            for descriptor, about in told
            if about is not None
        ]

    @_on_serving_thread
    def read(self, descriptor: int, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of a slot's file. Raises KeyError if the slot was closed."""
        return self._slot(descriptor).data[start:stop]

    @_on_serving_thread
    def newest_set_for_copy(self, rank: int) -> tuple[int, tuple[int, bytes], int] | None:
        """Return file descriptor, identity (`Slot.identity`) and bytes of a rank's newest set; None if it has none."""
        known = self._ranks.get(rank)
        newest = max(known.slots, key=lambda slot: slot.seal) if known is not None else None
        if newest is None or not newest.seal:
            return None
        return newest.descriptor, newest.identity, newest.used_bytes

    @_on_serving_thread
    def identity(self, descriptor: int) -> tuple[int, bytes]:
        """Return the identity of the set in a slot. It changes when the rank overwrites the set."""
        return self._slot(descriptor).identity

    @_on_copying_thread
    def copy(self, source: Any, rank: int, attempt: int) -> bool:
        """Fetch the newest set of a rank from the keeper `source`. Return False only if this node lacks memory for it.
        The copy is discarded if the set is overwritten, or the node of `source` is lost, meanwhile."""
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
        """Return a slot for a copy of `used` bytes: the oldest of two copies, or a new one. Raises OSError."""
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
    """Copy the `used_bytes` bytes of a slot of the keeper `source` to `target`. Return whether the slot still held the
    set `identity` at the end. If not, or if RayError, GetTimeoutError or KeyError is raised, `target` is closed."""
    whole = False
    try:
        for start in range(8, used_bytes, _CHUNK_BYTES):  # bytes 0 to 7 say that the set is complete: written last
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
    """Open the slots at `place`; return None if the process that wrote them has ended."""
    pid, files = place
    try:
        return [Slot.open_from_process(pid, descriptor) for descriptor, _ in files]
    except OSError:
        return None


def _close_slots(slots: Sequence[Slot]) -> None:
    """Close slots, and mark them as dropped for the rank that writes them."""
    for slot in slots:
        slot.mark_sets_dropped()
        slot.close()


def _end_copy_wait(slots: Sequence[Slot], copied: "Future[bool]") -> None:
    """Let a rank write its next set, since the partner has copied the newest one, lacks memory for it, or has died."""
    refused = copied.exception() is None and not copied.result()
    for slot in slots:
        with suppress(ValueError):  # the slots were closed because the rank has ended
            if refused and slot.awaits_copy:
                slot.mark_copy_refused()
            else:
                slot.mark_copy_awaited(False)


def ensure_keepers(keeper_by_node: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return a keeper for each of `nodes`: that of `keeper_by_node` unless its process has died, else a new one."""
    pings = {node: keeper_by_node[node].ping.remote() for node in nodes if node in keeper_by_node}
    calls = list(pings.values())
    answered = set(ray.wait(calls, num_returns=len(calls), timeout=_PING_TIMEOUT_S)[0]) if calls else set()
    dead = {node for node, call in pings.items() if call in answered and not _ping_succeeded(call)}
    # A keeper that does not answer is kept: it may still be starting, or its machine may be busy.
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
    # Ray restarts a keeper that dies. It opens a rank's slots again when the rank completes its next set.
    actor = ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=threads)(MemoryKeeper)
    return actor.options(scheduling_strategy=strategy).remote()


_OFFERS_TIMEOUT_S = 3.0  # time limit for keepers to list their sets: keepers of lost nodes do not answer


class StateKeepersClient:
    """A rank's connection to the keepers of all nodes (`checkpoints.memory.Keeper`): registers, lists and reads sets.

    Args:
        keepers: the keeper of each node, by node id.
        nodes: node id of each rank. With several nodes, the keeper of another node copies this rank's sets.
        rank: number of this rank.
        attempt: number of its attempt.
        remembers: whether keepers may hold sets of an earlier group. If not, they are not asked for sets.
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
        if rank == 0 and count == 2:  # now all ranks have sets of this attempt
            self._drop_sets_up_to(self._attempt - 1)

    def drop_all_sets(self) -> None:
        self._drop_sets_up_to(self._attempt)

    def _drop_sets_up_to(self, attempt: int) -> None:
        for keeper in self._keepers.values():
            keeper.drop.remote(attempt)
            keeper.drop_copies.remote(attempt)

    def list_sets(self) -> list[HeldSlot]:
        """Return the sets of all keepers that answer within `_OFFERS_TIMEOUT_S`, sets on this node first."""
        calls = [keeper.offers.remote() for keeper in self._keepers.values() if self._remembers]
        found: list[HeldSlot] = []
        for call in ray.wait(calls, num_returns=len(calls), timeout=_OFFERS_TIMEOUT_S)[0] if calls else ():
            with suppress(RayError):
                found += ray.get(call)
        return sorted(found, key=lambda held: held["node"] != self._node)

    def describe(self, held: HeldSlot) -> SlotDescription:
        return SlotDescription.model_validate_json(held["description"])

    def open_set(self, held: HeldSlot) -> Callable[[int, int], Any]:
        """Return a function that reads bytes `start` to `stop` of a set's body. If the keeper of the set has
        died, that function raises RayError; if it was this node's keeper, `open_set` itself raises OSError."""
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
