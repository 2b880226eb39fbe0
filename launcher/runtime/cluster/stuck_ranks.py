"""Kills ranks that are stuck, and ranks of a run that another start has taken over. It uses no store."""

import os
import signal
from collections.abc import Sequence

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launcher.runtime.policies.watchdog import RankLocation, Stuck

# Time limit for the nodes to kill ranks; a node that does not answer is lost to Ray as well.
_KILL_TIMEOUT_S = 10.0
_LISTED_RANKS = 8  # most ranks that a message names: when one of a thousand ranks hangs, all do


def stuck_text(stuck_ranks: Sequence[Stuck]) -> str:
    """Return which ranks are stuck and why, as text."""
    more = f"; {len(stuck_ranks) - _LISTED_RANKS} more" if len(stuck_ranks) > _LISTED_RANKS else ""
    return "; ".join(map(str, stuck_ranks[:_LISTED_RANKS])) + more


def kill_ranks(places: Sequence[RankLocation]) -> None:
    """Send SIGKILL to the ranks at `places`, through a task on each rank's node. Return when all tasks have ended, or
    after `_KILL_TIMEOUT_S` seconds if a node does not answer."""
    task = ray.remote(num_cpus=0, max_retries=0)(_kill)
    orders = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)).remote(
            place.pid
        )
        for place in places
    ]
    ray.wait(orders, num_returns=len(orders), timeout=_KILL_TIMEOUT_S)


def _kill(pid: int) -> None:
    """Kill the process `pid` if it is still a worker of Ray. By now the number may belong to another process."""
    try:
        if any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()):
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
