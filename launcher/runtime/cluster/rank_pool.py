"""The processes in which ranks run. They are reused by all groups of a command, so that restarts are fast.

When a group ends, a process stays if it can train again: the group ended without an error, or another rank died. A dead
process is replaced by a spare process of its node, or else by a new one. So after a death, a change of the number of
ranks, or the exclusion of a node, most processes rebuild only the model, the engine and the connections. If no process
stays, the reservations of resources are made again, too.
"""

import time
from collections import Counter
from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from launcher.runtime.cluster.memory_keeper import ensure_keepers
from launcher.runtime.cluster.nodes import dead_process, draining_node_ids
from launcher.runtime.cluster.rank_placement import Placement, Seat
from launcher.runtime.cluster.rank_process import CONCURRENCY_GROUPS, RankProcess
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.policies.recovery import Recovery, spare_counts

WaitSteps = Generator[None, None, None]
"""A generator that waits for something, and yields regularly so that its caller can do other things meanwhile."""

ProcessOrigin = Literal["stayed", "spare", "new"]
"""Where a rank's process comes from: the last group, a spare process, or newly started."""

_RESERVATION_TIMEOUT_S = 10.0  # time limit for Ray to reserve the ranks' resources
_MOVE_TIMEOUT_S = 3.0  # time limit for Ray to move the reservations of a lost node
_MOVE_POLL_S = 0.1  # interval of checks whether they have been moved
_ALIVE_TIMEOUT_S = 1.0  # time limit for a spare process to answer
_NODE_LABEL = "ray.io/node-id"  # label of each node in Ray: its id


@dataclass(eq=False)
class RankPlace:
    """A reservation of resources (a bundle of a Ray placement group) for one rank, and the rank's process.

    Attributes:
        group, bundle: Ray's placement group, and the index of the bundle in it.
        number: sort key: the ranks are in the order of these numbers.
        actor: handle of the process; None if the last one died.
        origin: where the process comes from.
        placement: placement of the process, or if it died, of the dead process; None if unknown.
        seat: the last seat of the process.
    """

    group: Any
    bundle: int
    number: int
    actor: Any = None
    origin: ProcessOrigin = "new"
    placement: Placement | None = None
    seat: Seat | None = None

    @property
    def node(self) -> str | None:
        """Node id of the process, or if it died, of the dead process; None if unknown."""
        return self.placement.node if self.placement is not None else None

    def can_take_seat(self, seat: Seat) -> bool:
        """Return whether the process can take `seat`. If it has trained before, its visible GPUs can no longer
        change."""
        return self.origin != "stayed" or self.seat is None or self.seat.visible_gpus == seat.visible_gpus

    def end_process(self) -> None:
        if self.actor is not None:
            _kill_actor(self.actor)
            self.actor = None


@dataclass(frozen=True)
class _SpareProcess:
    actor: Any  # handle of the process
    node: str  # id of its node
    loaded: Any  # ObjectRef of the placement that `RankProcess.load` returns


class RankPool:
    """Owns the processes of ranks, spare processes and memory keepers, as a context manager that kills them at its end.

    Args:
        run_uri: URI of the run.
        sizing: the resources that a rank reserves.
        recovery: settings of spare processes and in-memory copies.
    """

    def __init__(self, run_uri: str, sizing: Sizing, recovery: Recovery) -> None:
        self._run_uri, self._each, self._recovery = run_uri, dict(sizing.each), recovery
        self._keepers: dict[str, Any] = {}
        self._groups: list[Any] = []  # Ray's placement groups: the reservations of all places
        self._places: list[RankPlace] = []
        self._vacant: list[RankPlace] = []  # reserved places that no rank uses now
        self._spares: list[_SpareProcess] = []
        self._ended = False  # whether a group has ended
        self._frugal = False  # whether the group saves memory: no keepers, no spare processes

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: object) -> None:
        if dead_process() is not None:  # if Ray has died, its workers die too
            return
        self._end_keepers_and_spares()
        self._release_all_places()

    def _end_keepers_and_spares(self) -> None:
        for actor in (*(spare.actor for spare in self._spares), *self._keepers.values()):
            _kill_actor(actor)
        self._spares, self._keepers = [], {}

    def fill(self, start: GroupStart, poll_s: float) -> Generator[None, None, list[RankPlace]]:
        """Return the places of a group in the order of its ranks, each with a process; an empty list if Ray could not
        reserve them in time. New processes have no placement yet.

        Processes that stayed keep their order. A process that replaces a dead one takes its rank."""
        self._frugal = start.frugal
        if start.frugal:
            self._end_keepers_and_spares()
        avoided = start.without | draining_node_ids()
        stayed = [place for place in self._places if place.actor is not None and place.node not in avoided]
        if not stayed:
            self._release_all_places()
        kept = stayed[: start.ranks]
        self._end_other_processes(kept)
        kept += yield from self._reuse_vacant_places(start.ranks - len(kept), avoided)
        self._vacant = [place for place in self._vacant if place not in kept]
        if len(kept) < start.ranks:
            kept += self._reserve_places(start.ranks - len(kept), start.without)
            placed = yield from _wait_for_reservation(self._groups[-1], poll_s)
        else:
            placed = True
        self._places = sorted(kept, key=lambda place: place.number)
        if not placed:
            self._release_all_places()
            return []
        for place in self._places:
            if place.actor is None:
                self._start_process_in(place)
        return self._places

    def sort(self, order: Sequence[int]) -> list[RankPlace]:
        """Sort the places by rank and return them. `order`: the present index of each rank's place."""
        self._places = [self._places[index] for index in order]
        for number, place in enumerate(self._places):
            place.number = number
        return self._places

    def keepers(self) -> Mapping[str, Any]:
        """Start missing memory keepers on the nodes of the present ranks. Return all keepers by node id; empty if ranks
        make no in-memory copies."""
        if self._recovery.memory_every == "never" or self._frugal:
            return {}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ours = {place.node for place in self._places if place.node is not None}
        self._keepers = ensure_keepers(self._keepers, sorted(alive & (ours | self._keepers.keys())))
        return dict(self._keepers)

    @property
    def remembers(self) -> bool:
        """Whether the memory keepers may hold in-memory copies of the state of an earlier group."""
        return self._ended

    def release(self, stay: Mapping[int, bool]) -> None:
        """Take back the processes of a group that has ended, and kill those that cannot train again. `stay`: by rank,
        whether its process can train again; False for ranks that are missing."""
        self._ended = True
        for rank, place in enumerate(self._places):
            if stay.get(rank, False):
                place.origin = "stayed"
            else:
                place.end_process()

    def start_missing_spares(self) -> None:
        """Start missing spare processes on the nodes of the ranks. It is called regularly while ranks train."""
        if self._frugal:
            return
        ranks = Counter(place.node for place in self._places if place.node is not None)
        there = Counter(spare.node for spare in self._spares)
        memory = {node["NodeID"]: node["Resources"].get("memory", 0.0) for node in ray.nodes()}
        wanted = spare_counts(ranks, memory, self._recovery.spares)
        missing = {node: count - there[node] for node, count in sorted(wanted.items())}
        gone = draining_node_ids() if any(count > 0 for count in missing.values()) else frozenset()
        for node, count in missing.items():
            if node not in gone:
                self._spares += [self._start_spare(node, ranks[node]) for _ in range(count)]

    def _end_other_processes(self, kept: Sequence[RankPlace]) -> None:
        """End the processes of all places except `kept`. Those places stay reserved for later groups."""
        left = [place for place in self._places if place not in kept]
        for place in left:
            place.end_process()
        self._vacant = [*self._vacant, *left]

    def _reuse_vacant_places(self, count: int, avoided: Container[str]) -> Generator[None, None, list[RankPlace]]:
        """Return at most `count` vacant places on living nodes outside `avoided`. When a node is lost, Ray moves its
        reservations to other nodes that have room: this waits up to `_MOVE_TIMEOUT_S` for that."""
        deadline = time.monotonic() + _MOVE_TIMEOUT_S
        while True:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            now = {place: node for place, node in self._vacant_places() if node in alive}
            found = [place for place, node in now.items() if node not in avoided][:count]
            moving = len(now) < len(self._vacant)
            if len(found) == count or not moving or time.monotonic() > deadline:
                break
            yield
            time.sleep(_MOVE_POLL_S)
        for place in found:
            if place.node != now[place]:
                place.placement = place.seat = None
        return found

    def _vacant_places(self) -> list[tuple[RankPlace, str]]:
        """Return each vacant place with the id of the node that it is reserved on; "" if it has no node now."""
        groups = {id(place.group): place.group for place in self._vacant}
        tables = {key: placement_group_table(group)["bundles_to_node_id"] for key, group in groups.items()}
        vacant = sorted(self._vacant, key=lambda place: place.number)
        return [(place, tables[id(place.group)].get(place.bundle, "")) for place in vacant]

    def _reserve_places(self, count: int, excluded_nodes: frozenset[str]) -> list[RankPlace]:
        label = {_NODE_LABEL: f"!in({','.join(sorted(excluded_nodes))})"} if excluded_nodes else {}
        group = placement_group(
            [self._each] * count,
            strategy="PACK",
            bundle_label_selector=[label] * count if excluded_nodes else None,
        )
        self._groups.append(group)
        number = max((place.number for place in (*self._places, *self._vacant)), default=-1) + 1
        return [RankPlace(group, bundle, number + bundle) for bundle in range(count)]

    def _start_process_in(self, place: RankPlace) -> None:
        """Start a process in `place`: a spare process of the same node, which uses the GPUs of the dead process (still
        reserved by the placement group); or else a new process."""
        before = place.placement
        while before is not None and (spare := self._take_spare(before.node)) is not None:
            with suppress(RayError):
                there: Placement = ray.get(spare.loaded, timeout=_ALIVE_TIMEOUT_S)
                ray.get(spare.actor.placement.remote(), timeout=_ALIVE_TIMEOUT_S)
                place.actor, place.origin = spare.actor, "spare"
                place.placement = replace(before, pid=there.pid)
                return
            _kill_actor(spare.actor)
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle)
        place.actor, place.origin = self._start_actor(self._each, strategy), "new"
        place.placement = place.seat = None

    def _take_spare(self, node: str) -> _SpareProcess | None:
        """Return a spare process of `node` that has loaded its libraries; None if there is none."""
        for spare in self._spares:
            if spare.node == node and ray.wait([spare.loaded], timeout=0)[0]:
                self._spares.remove(spare)
                return spare
        return None

    def _start_spare(self, node: str, ranks: int) -> _SpareProcess:
        actor = self._start_actor({}, NodeAffinitySchedulingStrategy(node, soft=False))
        return _SpareProcess(actor, node, actor.load.remote(self._run_uri, "GPU" in self._each, ranks))

    def _start_actor(self, resources: Mapping[str, float], strategy: Any) -> Any:
        cores, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        actor = ray.remote(num_cpus=cores, num_gpus=gpus, max_restarts=0, concurrency_groups=CONCURRENCY_GROUPS)(
            RankProcess
        )
        return actor.options(scheduling_strategy=strategy).remote()

    def _release_all_places(self) -> None:
        """End the processes of all ranks, and free their reservations. Spare processes stay."""
        for place in self._places:
            place.end_process()
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        self._groups, self._places, self._vacant = [], [], []


def _wait_for_reservation(group: Any, poll_s: float) -> Generator[None, None, bool]:
    deadline = time.monotonic() + _RESERVATION_TIMEOUT_S
    while time.monotonic() < deadline:
        if group.wait(poll_s):
            return True
        yield
    return False


def _kill_actor(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)
