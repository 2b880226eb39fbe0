"""A group of ranks: the driver's handles of Ray actors that start, train and end together.

If one rank dies the group ends, because training is collective. The driver's loop decides which group comes next
(`launcher.runtime.cluster.control_loop`). The processes come from a pool and return to it
(`launcher.runtime.cluster.rank_pool`). The actor is in `launcher.runtime.cluster.rank_process`; what a rank does is in
`launcher.runtime.cluster.worker`. Ray Train would need four more processes (a controller, a cleaner, a barrier, an
autoscaler's coordinator), each of which takes seconds to start and may die.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launcher.runtime.cluster.nodes import dead_process
from launcher.runtime.cluster.orders import Assignment, JoinedGroup, RankNews, RankOrders, RankResult
from launcher.runtime.cluster.rank_placement import Seat, assign_seats, rank_order
from launcher.runtime.cluster.rank_pool import RankPlace, RankPool, WaitSteps
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.watchdog import RankLocation, StuckRank, heartbeat_interval_s
from launcher.runtime.rank.startup import StartupClock

READY_TIMEOUT_S = 180.0  # time limit for all processes to start: imports from a cold disk are slow
# Once one rank has failed, time limit for the others to abort their collectives and report their errors.
_LEAVE_TIMEOUT_S = 5.0
_LAST_NEWS_TIMEOUT_S = 1.0  # time limit for calls of `talk` that are still pending when a group ends


class RankGroup:
    """The ranks of one group, as a context manager that returns their processes to the pool at its end.

    Attributes:
        orders: the orders that `talk` sends to all ranks.
        failed: the ranks whose failure ended the group.
        ends: result of the last call (`join` or `train`) of each rank that has returned.
    """

    def __init__(self, start: GroupStart, pool: RankPool) -> None:
        self.orders = RankOrders()
        self.failed: list[int] = []
        self.ends: dict[int, RankResult] = {}
        self._start, self._pool = start, pool
        self._places: list[RankPlace] = []
        self._calls: list[Any] = []  # the last call of `join`, `train`, ... to each rank
        self._pending_talks: dict[Any, int] = {}  # rank of each call of `talk` that has no answer yet
        self._sent_orders: dict[int, tuple[RankOrders, float]] = {}  # the last orders to each rank, and when sent
        self._interval = heartbeat_interval_s(start.ranks)  # seconds between calls of `talk` to a rank

    def __enter__(self) -> "RankGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if dead_process() is None:  # if Ray has died, its workers die too
            ended = _done_calls(self._calls, 0.0)
            self._pool.release({rank: _can_train_again(call) for rank, call in enumerate(self._calls) if call in ended})

    @property
    def done(self) -> bool:
        """Whether rank 0 has finished training."""
        return 0 in self.ends and not isinstance(self.ends[0].outcome, JoinedGroup)

    @property
    def started_ranks(self) -> int:
        """Number of ranks whose processes have been called to join."""
        return len(self._places)

    @property
    def joined(self) -> bool:
        """Whether all ranks have joined the group."""
        ends = [end.outcome for end in self.ends.values()]
        return not self.failed and len(ends) == self._start.ranks and all(isinstance(end, JoinedGroup) for end in ends)

    def join(self, assignment: Assignment, poll_s: float) -> WaitSteps:
        """Start the ranks' processes, assign their seats, and have them join one process group. Yield at least every
        `poll_s` seconds. Raises SeatError as `assign_seats`."""
        startup = StartupClock(assignment.before)
        places = yield from self._pool.fill(self._start, poll_s)
        if not places:
            return
        startup.end_part("places")
        taken = yield from self._seat_ranks(places, poll_s)
        if not taken:
            return
        startup.end_part("processes")
        assignment = replace(
            assignment,
            before=startup.before | startup.seconds,
            keepers=self._pool.keepers(),
            remembers=self._pool.remembers,
            processes=Counter(place.origin for place in places),
        )
        self._places, number = places, self._start.number
        calls = [place.actor.join.remote(number, seat, assignment) for place, seat in zip(places, taken, strict=True)]
        yield from self._await_calls(calls, poll_s, float("inf"))

    def train(self, attempt: int, poll_s: float) -> WaitSteps:
        """Have the joined ranks train as attempt number `attempt`. Yield at least every `poll_s` seconds."""
        self.ends = {}
        calls = [place.actor.train.remote(attempt) for place in self._places]
        yield from self._await_calls(calls, poll_s, float("inf"))

    def talk(self) -> list[tuple[int, RankNews]]:
        """Send `orders` to each rank if they are new or a heartbeat is due, unless a call to the rank is pending.
        Return the answers that have come in, with their ranks."""
        news = self._collect_answers(0.0)
        now, busy = time.monotonic(), set(self._pending_talks.values())
        for rank, place in enumerate(self._places):
            sent_orders, at = self._sent_orders.get(rank, (None, 0.0))
            if rank not in busy and (sent_orders != self.orders or now - at >= self._interval):
                self._sent_orders[rank] = (self.orders, now)
                self._pending_talks[place.actor.talk.remote(self._start.number, self.orders)] = rank
        return news

    def last_news(self) -> list[tuple[int, RankNews]]:
        """Return the ranks and their last news after the group has ended."""
        news = self._collect_answers(_LAST_NEWS_TIMEOUT_S)
        return news + [(rank, end.news) for rank, end in self.ends.items() if end.news is not None]

    def _collect_answers(self, patience_s: float) -> list[tuple[int, RankNews]]:
        found, talks = [], [talk for talk, rank in self._pending_talks.items() if rank not in self.failed]
        for answer in ray.wait(talks, num_returns=len(talks), timeout=patience_s)[0] if talks else ():
            rank = self._pending_talks.pop(answer)
            with suppress(RayError):  # the rank has died, which its pending call in `_calls` reports
                news = ray.get(answer)
                if news is not None:
                    found.append((rank, news))
        return found

    def _seat_ranks(self, places: list[RankPlace], poll_s: float) -> Generator[None, None, list[Seat]]:
        """Return the seats of the ranks. If no process stayed from an earlier group, sort `places` by node and GPU.
        Return an empty list if a rank failed, or if a process that stayed cannot see the GPUs of its new seat."""
        placements = [place.actor.placement.remote() for place in places]
        found = yield from self._await_calls(placements, poll_s, READY_TIMEOUT_S)
        if self.failed:
            return []
        none_placed = all(place.placement is None for place in places)
        for place, placement in zip(places, found, strict=True):
            place.placement = place.placement or placement
        if none_placed:
            places[:] = self._pool.sort(rank_order(found))
        ports = yield from self._await_calls(
            [place.actor.free_port.remote() for place in places], poll_s, READY_TIMEOUT_S
        )
        if self.failed:
            return []
        taken = assign_seats([place.placement for place in places if place.placement is not None], ports[0])
        if not all(place.can_take_seat(seat) for place, seat in zip(places, taken, strict=True)):
            self._calls = []  # so that `__exit__` ends all processes, and the next group gets new ones
            return []
        for place, seat in zip(places, taken, strict=True):
            place.seat = seat
        return taken

    def _await_calls(self, calls: list[Any], poll_s: float, patience_s: float) -> Generator[None, None, list[Any]]:
        """Wait for one call to each actor, and return the results; if a rank fails, set `failed` and return []."""
        self._calls = calls
        deadline, left = time.monotonic() + patience_s, calls
        while left and not self.failed:
            if time.monotonic() > deadline:
                self.failed = [calls.index(call) for call in left]
                return []
            ray.wait(left, num_returns=1, timeout=poll_s)
            done, left = ray.wait(left, num_returns=len(left), timeout=0)
            if not all(map(_can_train_again, done)):
                self._order_others_to_leave()
                done = [*done, *_done_calls(left, _LEAVE_TIMEOUT_S + self._interval)]
                over = set(done)
                self.failed = [rank for rank, call in enumerate(calls) if call in over and not _can_train_again(call)]
            self._note_ends(done)
            yield
        return [] if self.failed else ray.get(calls)

    def _order_others_to_leave(self) -> None:
        """Order all ranks to abort their collectives, which would wait for the dead rank forever."""
        self.orders = replace(self.orders, abort=True)
        for rank, place in enumerate(self._places):
            self._pending_talks[place.actor.talk.remote(self._start.number, self.orders)] = rank

    def _note_ends(self, done_calls: Sequence[Any]) -> None:
        """Add the results of finished calls to `ends`. Ranks that cannot train again come first, because the errors of
        the others may be mere consequences."""
        ranks, ends = {call: rank for rank, call in enumerate(self._calls)}, []
        for call in done_calls:
            with suppress(RayError):
                if isinstance(end := ray.get(call), RankResult):
                    ends.append((end.stays, ranks[call], end))
        self.ends |= {rank: end for _, rank, end in sorted(ends, key=lambda one: one[:2])}


def _done_calls(calls: Sequence[Any], patience_s: float) -> set[Any]:
    return set(ray.wait(list(calls), num_returns=len(calls), timeout=patience_s)[0]) if calls else set()


def _can_train_again(call: Any) -> bool:
    """Return whether the process of a finished call can train again. It cannot if it died or its rank failed."""
    try:
        found = ray.get(call)
    except RayError:
        return False
    return not isinstance(found, RankResult) or found.stays


# Time limit of the tasks that kill ranks: a node that takes longer is lost.
_KILL_TIMEOUT_S = 10.0
_LISTED_RANKS = 8  # number of ranks that a message lists: if one of a thousand hangs, all do


def stuck_text(stuck_ranks: Sequence[StuckRank]) -> str:
    """Return a text that says which ranks are stuck and why."""
    more = f"; {len(stuck_ranks) - _LISTED_RANKS} more" if len(stuck_ranks) > _LISTED_RANKS else ""
    return "; ".join(map(str, stuck_ranks[:_LISTED_RANKS])) + more


def kill_ranks(places: Sequence[RankLocation]) -> None:
    """Kill the ranks' processes with SIGKILL, through a task on each rank's node. Return when all tasks have ended, or
    after `_KILL_TIMEOUT_S` seconds."""
    task = ray.remote(num_cpus=0, max_retries=0)(_kill_ray_worker)
    orders = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)).remote(place.pid)
        for place in places
    ]
    ray.wait(orders, num_returns=len(orders), timeout=_KILL_TIMEOUT_S)


def _kill_ray_worker(pid: int) -> None:
    """Kill process `pid` if it is a Ray worker. The rank may have ended, and its pid may belong to another process."""
    try:
        if any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
