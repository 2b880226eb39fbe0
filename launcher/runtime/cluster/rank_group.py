"""A group of ranks: Ray actors that are placed together, get their seats, train and end together.

If one rank dies the group ends, because training is collective. The coordinator decides which group comes next
(`launcher.runtime.cluster.coordinator`). The actor is in `launcher.runtime.cluster.rank_process`; what a rank does is
in `launcher.runtime.cluster.worker`. Ray Train would do the same through four more processes (a controller, a
cleaner, a barrier, an autoscaler's coordinator). Each of those takes seconds to start and is one more that may die.
"""

import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.runtime.cluster.assignment import Assignment
from launcher.runtime.cluster.nodes import lost
from launcher.runtime.cluster.rank_placement import ordered, seats
from launcher.runtime.cluster.rank_process import RankProcess
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.rank.startup import Startup

PLACED_S = 10.0  # time limit for Ray to reserve the places of the ranks
SEATED_S = 180.0  # time limit for all processes to start: imports from a cold disk take long
_OTHERS_S = 2.0  # time that the other ranks have to report their errors once one has failed
_NODE_LABEL = "ray.io/node-id"

Waiting = Generator[None, None, None]
"""A generator that yields now and then, so that its caller can do other things while it waits."""


class RankGroup:
    """The ranks of one start, as a context manager that kills the remaining ranks when it ends.

    Attributes:
        failed: the ranks that failed and thereby ended the group.
    """

    def __init__(self, start: GroupStart, sizing: Sizing) -> None:
        self.failed: list[int] = []
        self._count, self._each = start.ranks, dict(sizing.each)
        without = {_NODE_LABEL: f"!in({','.join(sorted(start.without))})"} if start.without else {}
        self._placement = placement_group(
            [self._each] * start.ranks,
            strategy="PACK",
            bundle_label_selector=[without] * start.ranks if without else None,
        )
        self._actors: list[Any] = []

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if lost() is not None:  # nobody is there to be asked, and they die with their node
            return
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        with suppress(RayError):
            remove_placement_group(self._placement)

    def live(self, assignment: Assignment, poll_s: float) -> Waiting:
        """Place the ranks, start them and follow them until all have ended. Yield every `poll_s` seconds or more
        often. Raises SeatError if the GPUs of a node cannot be told apart."""
        startup = Startup(assignment.before)
        placed = yield from self._placed(poll_s)
        if not placed:
            return
        startup.done("places")
        self._actors = [self._actor(bundle) for bundle in range(self._count)]
        placements = yield from self._all(
            [actor.placement.remote() for actor in self._actors], poll_s, SEATED_S
        )
        if self.failed:
            return
        order = ordered(placements)
        self._actors = [self._actors[index] for index in order]
        ports = yield from self._all([self._actors[0].free_port.remote()], poll_s, SEATED_S)
        if self.failed:
            return
        taken = seats([placements[index] for index in order], ports[0])
        pairs = list(zip(self._actors, taken, strict=True))
        told = [actor.assign_seat.remote(seat, assignment.coordinator) for actor, seat in pairs]
        yield from self._all(told, poll_s, SEATED_S)
        if self.failed:
            return
        startup.done("processes")
        assignment = replace(assignment, before=startup.before | startup.seconds)
        ends = [actor.run.remote(seat, assignment) for actor, seat in pairs]
        yield from self._all(ends, poll_s, float("inf"))

    def _placed(self, poll_s: float) -> Generator[None, None, bool]:
        deadline = time.monotonic() + PLACED_S
        while time.monotonic() < deadline:
            if self._placement.wait(poll_s):
                return True
            yield
        return False

    def _actor(self, bundle: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        options = ray.remote(RankProcess).options(
            num_cpus=self._each.get("CPU", 0),
            num_gpus=self._each.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=where,
        )
        return options.remote()

    def _all(self, refs: list[Any], poll_s: float, patience_s: float) -> Generator[None, None, list[Any]]:
        """Return the results of one call to each actor; an empty list if one has `failed`."""
        deadline, left = time.monotonic() + patience_s, refs
        while left and not self.failed:
            if time.monotonic() > deadline:
                self.failed = [refs.index(ref) for ref in left]
                return []
            done, left = ray.wait(left, num_returns=len(left), timeout=poll_s)
            if any(_bad(ref) for ref in done):
                ray.wait(left, num_returns=len(left), timeout=_OTHERS_S)
                self.failed = [rank for rank, ref in enumerate(refs) if _bad(ref)]
            yield
        return [] if self.failed else ray.get(refs)


def _bad(ref: Any) -> bool:
    """Return whether the call is over and has raised, or its process died."""
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except RayError:
        return True
    return False
