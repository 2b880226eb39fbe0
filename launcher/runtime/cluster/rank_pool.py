"""The processes in which ranks run, through all groups of a command.

A process stays when its group has ended, if it can train again: the group ended in good order, or another rank died. A
spare process takes the place of a dead one on its node, or else a new process does. So after a death only the model,
the engine and the connections are made anew. If the next group cannot have the same places, all processes are ended,
and the group gets new places and new processes.
"""

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from launcher.runtime.cluster.memory_keeper import ensure_keepers
from launcher.runtime.cluster.nodes import draining, lost
from launcher.runtime.cluster.rank_placement import Placement, Seat
from launcher.runtime.cluster.rank_process import RankProcess
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.policies.recovery import Recovery

Waiting = Generator[None, None, None]
"""A generator that yields now and then, so that its caller can do other things while it waits."""

Origin = Literal["stayed", "spare", "new"]
"""Where a rank's process comes from."""

_PLACED_S = 10.0  # time limit for Ray to reserve the places of the ranks
_ALIVE_S = 1.0  # time limit for a spare process to answer
_NODE_LABEL = "ray.io/node-id"


@dataclass
class Place:
    """The place of a rank in the placement group, and its process.

    Attributes:
        bundle: number of the place in the placement group.
        actor: handle of the process; None if the last one died.
        origin: where the process comes from.
        placement: node, address, GPUs and number of the process, or of the one before; None if not known yet.
        seat: the rank's last seat.
    """

    bundle: int
    actor: Any = None
    origin: Origin = "new"
    placement: Placement | None = None
    seat: Seat | None = None

    def sees(self, seat: Seat) -> bool:
        """Return whether the process can have this seat. CUDA has read the node's GPUs if it had one before."""
        return self.origin != "stayed" or self.seat is None or self.seat.visible == seat.visible


@dataclass(frozen=True)
class _Spare:
    actor: Any
    node: str
    loaded: Any  # reference to its placement


class RankPool:
    """The processes of the ranks, as a context manager that kills them when it ends.

    Args:
        run_uri: the run.
        sizing: what a rank reserves on its node.
        recovery: how many spare processes each node with ranks has, and whether ranks copy their state to memory.
    """

    def __init__(self, run_uri: str, sizing: Sizing, recovery: Recovery) -> None:
        self._run_uri, self._each, self._recovery = run_uri, dict(sizing.each), recovery
        self._keepers: dict[str, Any] = {}
        self._group: Any = None
        self._places: list[Place] = []
        self._spares: list[_Spare] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: object) -> None:
        if lost() is not None:  # nobody is there to be asked, and they die with their node
            return
        for actor in (*(spare.actor for spare in self._spares), *self._keepers.values()):
            _kill(actor)
        self._clear()

    def fill(self, start: GroupStart, poll_s: float) -> Generator[None, None, list[Place]]:
        """Return the places of a group in the order of its ranks, each with a process. The list is empty if Ray does
        not find them in time. Processes that are new have no placement yet."""
        if not self._suits(start):
            self._clear()
            self._reserve(start)
        if not (yield from self._placed(poll_s)):
            self._clear()
            return []
        for place in self._places:
            if place.actor is None:
                self._occupy(place)
        return self._places

    def sort(self, order: Sequence[int]) -> list[Place]:
        """Give the places the order of ranks, `order` being their numbers so far; return them."""
        self._places = [self._places[index] for index in order]
        return self._places

    def keepers(self) -> Mapping[str, Any]:
        """Return the keeper of states in memory on each node, by the node's id, for the present ranks; empty if the
        ranks make no copies."""
        if self._recovery.memory_every == "never":
            return {}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ours = {place.placement.node for place in self._places if place.placement is not None}
        self._keepers = ensure_keepers(self._keepers, sorted(alive & (ours | self._keepers.keys())))
        return dict(self._keepers)

    def release(self, stay: Mapping[int, bool]) -> None:
        """Take back the processes of a group that has ended, and kill those that cannot train again. `stay`: whether
        the process of a rank can; a rank that is missing cannot."""
        for rank, place in enumerate(self._places):
            if stay.get(rank, False):
                place.origin = "stayed"
            elif place.actor is not None:
                _kill(place.actor)
                place.actor = None

    def refill(self) -> None:
        """Start the spare processes that are missing on the nodes of the ranks. Call it while ranks train."""
        ranks = Counter(place.placement.node for place in self._places if place.placement is not None)
        gone = draining()
        for node in sorted(ranks.keys() - gone):
            for _ in range(self._recovery.spares - sum(spare.node == node for spare in self._spares)):
                self._spares.append(self._spare(node, ranks[node]))

    def _suits(self, start: GroupStart) -> bool:
        """Return whether the group can have the places of the last one, and some process stayed there."""
        nodes = {place.placement.node for place in self._places if place.placement is not None}
        stayed = any(place.actor is not None for place in self._places)
        return stayed and start.ranks == len(self._places) and not nodes & (start.without | draining())

    def _reserve(self, start: GroupStart) -> None:
        without = {_NODE_LABEL: f"!in({','.join(sorted(start.without))})"} if start.without else {}
        self._group = placement_group(
            [self._each] * start.ranks,
            strategy="PACK",
            bundle_label_selector=[without] * start.ranks if without else None,
        )
        self._places = [Place(bundle) for bundle in range(start.ranks)]

    def _placed(self, poll_s: float) -> Generator[None, None, bool]:
        deadline = time.monotonic() + _PLACED_S
        while time.monotonic() < deadline:
            if self._group.wait(poll_s):
                return True
            yield
        return False

    def _occupy(self, place: Place) -> None:
        """Give the place a process: a spare one of its node, which takes over the GPUs of the process before, which
        the placement group still reserves; or else a new one."""
        before = place.placement
        while before is not None and (spare := self._take(before.node)) is not None:
            with suppress(RayError):
                there: Placement = ray.get(spare.loaded, timeout=_ALIVE_S)
                ray.get(spare.actor.placement.remote(), timeout=_ALIVE_S)
                place.actor, place.origin = spare.actor, "spare"
                place.placement = replace(before, pid=there.pid)
                return
            _kill(spare.actor)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place.bundle)
        place.actor, place.origin = self._process(self._each, strategy), "new"
        place.placement = place.seat = None

    def _take(self, node: str) -> _Spare | None:
        """Return a spare process of `node` that has loaded its libraries; None if there is none."""
        for spare in self._spares:
            if spare.node == node and ray.wait([spare.loaded], timeout=0)[0]:
                self._spares.remove(spare)
                return spare
        return None

    def _spare(self, node: str, ranks: int) -> _Spare:
        actor = self._process({}, NodeAffinitySchedulingStrategy(node, soft=False))
        return _Spare(actor, node, actor.load.remote(self._run_uri, "GPU" in self._each, ranks))

    def _process(self, each: Mapping[str, float], strategy: Any) -> Any:
        options = ray.remote(RankProcess).options(
            num_cpus=each.get("CPU", 0),
            num_gpus=each.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return options.remote()

    def _clear(self) -> None:
        """End the processes of all ranks, and give up their places. Spare processes stay."""
        for place in self._places:
            if place.actor is not None:
                _kill(place.actor)
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
        self._group, self._places = None, []


def _kill(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)
