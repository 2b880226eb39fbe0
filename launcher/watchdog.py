"""The watchdog: which ranks make no progress, and what is done about it.

Nothing in Ray or NCCL bounds a hang inside a collective. Every rank says once a second where it is, from a thread of
its own: a rank that repeats itself for too long is stuck, a rank that says nothing is frozen or cut off. As all ranks
wait for the slowest, all are stuck soon after one is; the group is killed as a whole, and Ray starts it again.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launcher.watchdog_limits import Watchdog

_KILL_S = 10.0  # for the nodes to carry out a kill; a node that does not answer is lost to Ray as well


@dataclass(frozen=True)
class Place:
    """Where a rank's process is."""

    node: str
    pid: int


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life. Times in seconds since 1970, by the monitor's clock.

    Attributes:
        step, doing: where it said it was.
        since: when it first said so.
        heard: when it last said anything.
    """

    step: int
    doing: str
    since: float
    heard: float
    place: Place

    def again(self, step: int, doing: str, now: float) -> "Beat":
        """The next sign of life from the same process."""
        moved = (step, doing) != (self.step, self.doing)
        return Beat(step, doing, now if moved else self.since, now, self.place)


def stuck(beats: Mapping[int, Beat], now: float, limits: Watchdog) -> list[str]:
    """What is wrong, a line a rank, the ranks furthest behind first; empty while all is well."""
    found = [
        (beat.step, rank, problem)
        for rank, beat in beats.items()
        if (problem := _problem(beat, now, limits)) is not None
    ]
    return [f"rank {rank} {problem}" for _, rank, problem in sorted(found)]


def _problem(beat: Beat, now: float, limits: Watchdog) -> str | None:
    where = f"{beat.doing} at step {beat.step}"
    if now - beat.heard > limits.silence:
        return f"has been silent for {now - beat.heard:.0f} s, last {where}"
    if now - beat.since > (limits.step if beat.doing == "training" else limits.other):
        return f"has made no progress for {now - beat.since:.0f} s, {where}"
    return None


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


def here() -> Place:
    """This process, in a Ray worker."""
    return Place(ray.get_runtime_context().get_node_id(), os.getpid())


def stack_of_every_thread() -> str:
    """What this process is doing, a Python traceback a thread. Works from any thread while the others wait."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n\n" + "\n".join(parts)
