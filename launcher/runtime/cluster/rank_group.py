"""A group of ranks: Ray actors that get their seats, train and end together.

If one rank dies the group ends, because training is collective. The coordinator decides which group comes next
(`launcher.runtime.cluster.coordinator`). The processes come from a pool, to which they return
(`launcher.runtime.cluster.rank_pool`). The actor is in `launcher.runtime.cluster.rank_process`; what a rank does is in
`launcher.runtime.cluster.worker`. Ray Train would do the same through four more processes (a controller, a cleaner, a
barrier, an autoscaler's coordinator). Each of those takes seconds to start and is one more that may die.
"""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from launcher.runtime.cluster.assignment import Assignment
from launcher.runtime.cluster.nodes import lost
from launcher.runtime.cluster.rank_placement import Seat, ordered, seats
from launcher.runtime.cluster.rank_pool import Place, RankPool, Waiting
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.watchdog import beat_interval
from launcher.runtime.rank.startup import Startup

SEATED_S = 180.0  # time limit for all processes to start: imports from a cold disk take long
_OTHERS_S = 5.0
"""Time, besides a heartbeat's interval, that the other ranks have to leave or to report their errors, once one has
failed."""


class RankGroup:
    """The ranks of one start, as a context manager that returns their processes to the pool when it ends.

    Attributes:
        failed: the ranks that failed and thereby ended the group.
    """

    def __init__(self, start: GroupStart, pool: RankPool) -> None:
        self.failed: list[int] = []
        self._start, self._pool = start, pool
        self._calls: list[Any] = []  # the last call to each rank
        self._coordinator: Any = None

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if lost() is None:  # else nobody is there to be asked, and the ranks die with their node
            ended = _ended(self._calls, 0.0)
            self._pool.release({rank: _fine(call) for rank, call in enumerate(self._calls) if call in ended})

    def live(self, assignment: Assignment, poll_s: float) -> Waiting:
        """Place the ranks, start them and follow them until all have ended. Yield every `poll_s` seconds or more
        often. Raises SeatError if the GPUs of a node cannot be told apart."""
        startup, self._coordinator = Startup(assignment.before), assignment.coordinator
        places = yield from self._pool.fill(self._start, poll_s)
        if not places:
            return
        startup.done("places")
        taken = yield from self._seats(places, poll_s)
        if not taken:
            return
        pairs = list(zip([place.actor for place in places], taken, strict=True))
        told = [actor.assign_seat.remote(seat, assignment.coordinator) for actor, seat in pairs]
        yield from self._all(told, poll_s, SEATED_S)
        if self.failed:
            return
        startup.done("processes")
        assignment = replace(
            assignment,
            before=startup.before | startup.seconds,
            keepers=self._pool.keepers(),
            remembers=self._pool.remembers,
            processes=Counter(place.origin for place in places),
        )
        ends = [actor.run.remote(seat, assignment) for actor, seat in pairs]
        yield from self._all(ends, poll_s, float("inf"))

    def _seats(self, places: list[Place], poll_s: float) -> Generator[None, None, list[Seat]]:
        """Return the seats of the ranks, and bring `places` into their order: that of the last group if processes of it
        stayed. An empty list if a rank has `failed`, or a process that stayed does not see the GPUs of its seat."""
        asked = [place.actor.placement.remote() for place in places]
        found = yield from self._all(asked, poll_s, SEATED_S)
        if self.failed:
            return []
        anew = all(place.placement is None for place in places)
        for place, placement in zip(places, found, strict=True):
            place.placement = place.placement or placement
        if anew:
            places[:] = self._pool.sort(ordered(found))
        ports = yield from self._all([place.actor.free_port.remote() for place in places], poll_s, SEATED_S)
        if self.failed:
            return []
        taken = seats([place.placement for place in places if place.placement is not None], ports[0])
        if not all(place.sees(seat) for place, seat in zip(places, taken, strict=True)):
            self._calls = []  # then all processes end, and the next group has new ones
            return []
        for place, seat in zip(places, taken, strict=True):
            place.seat = seat
        return taken

    def _all(self, refs: list[Any], poll_s: float, patience_s: float) -> Generator[None, None, list[Any]]:
        """Return the results of one call to each actor; an empty list if one has `failed`."""
        self._calls = refs
        deadline, left = time.monotonic() + patience_s, refs
        while left and not self.failed:
            if time.monotonic() > deadline:
                self.failed = [refs.index(ref) for ref in left]
                return []
            done, left = ray.wait(left, num_returns=len(left), timeout=poll_s)
            if not all(map(_fine, done)):
                self._coordinator.rank_gone.remote(self._start.number)
                ended = _ended(refs, _OTHERS_S + beat_interval(len(refs)))
                self.failed = [rank for rank, ref in enumerate(refs) if ref in ended and not _fine(ref)]
            yield
        return [] if self.failed else ray.get(refs)


def _ended(calls: Sequence[Any], patience_s: float) -> set[Any]:
    """Return the calls that are over after at most `patience_s` seconds."""
    return set(ray.wait(list(calls), num_returns=len(calls), timeout=patience_s)[0]) if calls else set()


def _fine(call: Any) -> bool:
    """Return whether a call that is over has returned. If not, it has raised, or its process died."""
    try:
        ray.get(call)
    except RayError:
        return False
    return True
