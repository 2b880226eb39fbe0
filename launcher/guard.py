"""What the driver does about ranks that are stuck: keep what they were doing on record, and end them."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launcher.metrics import operator_event
from launcher.monitor import Status
from launcher.runs import Run
from launcher.watchdog import Place, stuck

_STACKS_S = 5.0  # to wait for the ranks that still answer
_POLL_S = 0.2
_KILL_S = 10.0  # for the nodes to carry out a kill; a node that does not answer is lost to Ray as well
_SHOWN = 8  # ranks that a message names: when one of a thousand hangs, all do


class Guard:
    """Watches the ranks of one start. Ray restarts the group once its processes are dead.

    Args:
        run: the run; stacks go to `events/stacks/` in its store.
        monitor: the monitor's handle.
        note: shows a line to the operator.
    """

    def __init__(self, run: Run, monitor: Any, note: Callable[[str], None]) -> None:
        self._run, self._monitor, self._note = run, monitor, note
        self._ended: int | None = None  # the attempt whose ranks were killed

    def check(self, status: Status) -> None:
        """End the present group if it is stuck. Quick while it is not."""
        if status.attempt in (None, self._ended) or status.finished is not None:
            return
        problems = stuck(status.beats, time.time(), self._run.recipe.watchdog)
        if problems:
            self._ended = status.attempt
            self._end(status, problems)

    def _end(self, status: Status, problems: list[str]) -> None:
        more = f"; {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        what = "; ".join(problems[:_SHOWN]) + more
        self._note(f"the ranks are stuck, and will be started again: {what}")
        answered = self._stacks(set(status.beats))
        for rank, text in answered.items():
            self._run.store.put(f"events/stacks/a{status.attempt:06d}/rank-{rank:05d}.txt", text.encode())
        silent = sorted(status.beats.keys() - answered.keys())
        operator_event(
            self._run.store, "hang", time.time(), attempt=status.attempt, what=what, without_stacks=silent
        )
        kill([beat.place for beat in status.beats.values()])

    def _stacks(self, ranks: set[int]) -> Mapping[int, str]:
        """What the ranks' threads are doing, of those that answer in time."""
        self._monitor.want_stacks.remote()
        deadline = time.monotonic() + _STACKS_S
        while True:
            answered: dict[int, str] = ray.get(self._monitor.stacks.remote())
            if answered.keys() >= ranks or time.monotonic() > deadline:
                return answered
            time.sleep(_POLL_S)


def kill(places: Sequence[Place]) -> None:
    """SIGKILL to ranks, each through its own node; returns when done, or after a while if a node does not answer."""
    task = ray.remote(num_cpus=0, max_retries=0)(_kill)
    orders = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)).remote(
            place.pid
        )
        for place in places
    ]
    ray.wait(orders, num_returns=len(orders), timeout=_KILL_S)


def _kill(pid: int) -> None:
    """Only if the process is still one of Ray's: the number may have been given to another since."""
    try:
        if any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
