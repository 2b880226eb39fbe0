"""Kills ranks that are stuck, and ranks of a run that another start has taken over."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launcher.runtime.cluster.orders import Status
from launcher.runtime.policies.watchdog import Observer, RankLocation, Stuck, culprits
from launcher.runtime.run.record import Run

_STACKS_S = 5.0  # time limit for the tracebacks of the ranks that still answer
_TELL_S = 5.0  # time limit of the report to the coordinator
_POLL_S = 0.2
_KILL_S = 10.0  # time limit for the nodes to kill ranks; a node that does not answer is lost to Ray as well
_LISTED_RANKS = 8  # most ranks that a message names: when one of a thousand ranks hangs, all do


class StuckRankKiller:
    """A watcher of the ranks through all starts of a command, which kills groups that are stuck.

    It uses no store. It tells the coordinator what to record, and kills the ranks whether or not that answers.

    Args:
        run: the run, whose recipe has the time limits.
        coordinator: the coordinator's handle.
        note: function that shows a line to the operator.
        clock: function that returns seconds and never goes back.
    """

    def __init__(
        self,
        run: Run,
        coordinator: Any,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._coordinator, self._note = run.recipe.watchdog, coordinator, note
        self._observer = Observer(clock)
        self._ended = 0  # the group whose ranks were killed

    def check(self, status: Status) -> None:
        """Look at the ranks, and kill the present group if it is stuck or the run was taken over. Call this often: it
        is fast in all other cases."""
        self._observer.look(status.beats)
        if status.group == self._ended or status.finished is not None:
            return
        found = self._observer.stuck(self._limits)
        if not found and not status.superseded:
            return
        self._ended = status.group
        if status.superseded:
            kill(_places(status))
        else:
            self._end(status, found)

    def _end(self, status: Status, found: Sequence[Stuck]) -> None:
        more = f"; {len(found) - _LISTED_RANKS} more" if len(found) > _LISTED_RANKS else ""
        what = "; ".join(map(str, found[:_LISTED_RANKS])) + more
        self._note(f"the ranks are stuck, and will be started again: {what}")
        try:
            self._ask_stacks(set(status.beats))
            self._tell(what, culprits(found, status.beats), status.group)
        finally:
            kill(_places(status))

    def _ask_stacks(self, ranks: set[int]) -> None:
        """Ask the ranks to send tracebacks of their threads to the coordinator. Wait until all `ranks` have answered,
        at most `_STACKS_S` seconds."""
        deadline = time.monotonic() + _STACKS_S
        with suppress(ray.exceptions.GetTimeoutError):
            while time.monotonic() < deadline:
                answered: Mapping[int, str] = ray.get(self._coordinator.stacks.remote(), timeout=_STACKS_S)
                if answered.keys() >= ranks:
                    return
                time.sleep(_POLL_S)

    def _tell(self, what: str, behind: Sequence[int], group: int) -> None:
        with suppress(ray.exceptions.GetTimeoutError):
            ray.get(self._coordinator.hung.remote(what, behind, group), timeout=_TELL_S)


def _places(status: Status) -> list[RankLocation]:
    return [beat.place for beat in status.beats.values()]


def kill(places: Sequence[RankLocation]) -> None:
    """Send SIGKILL to the ranks at `places`, through a task on each rank's node. Return when all tasks have ended, or
    after `_KILL_S` seconds if a node does not answer."""
    task = ray.remote(num_cpus=0, max_retries=0)(_kill)
    orders = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)).remote(
            place.pid
        )
        for place in places
    ]
    ray.wait(orders, num_returns=len(orders), timeout=_KILL_S)


def _kill(pid: int) -> None:
    """Kill the process `pid` if it is still a worker of Ray. By now the number may belong to another process."""
    try:
        if any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
