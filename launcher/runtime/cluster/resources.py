"""The resources of a run on its machine or cluster (ranks, data workers, CPUs, memory), and the number of ranks during
a command. `launcher.runtime.policies.elastic` decides how many ranks may start."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from launcher.errors import RunError, TransientRunError
from launcher.output import human_bytes
from launcher.runtime.policies.elastic import (
    Sizing,
    Trainers,
    count_places,
    nodes_to_exclude,
    rank_count,
    should_grow,
    world_change_cause,
)
from launcher.runtime.policies.failures import NODE_FAILURE_LIMIT
from launcher.runtime.recipe.schema import Recipe

# CPUs that Ray reserves for a rank: few, so that data tasks still fit on a small machine.
CPUS_PER_RANK = 0.25
# The same if the number of ranks may change (`Trainers`) and there are no GPUs: a core holds a rank and a data task.
CPUS_PER_ELASTIC_RANK = 0.75
MAX_DATA_WORKERS = 4  # largest number of data workers for each rank


@dataclass(frozen=True)
class LocalRayResources:
    """The resources with which a local Ray is started on this machine.

    Attributes:
        local_cpus: number of logical CPUs.
        object_store_bytes: size of the object store in bytes: twice the memory of the data service, plus 256 MiB for
            Ray itself.
    """

    local_cpus: int
    object_store_bytes: int

    def too_large_error(self, reason: str) -> RunError:
        """Return the error to raise if Ray cannot start because of `reason` (Ray's own text). It is a
        TransientRunError if the object store would fit once other processes have ended."""
        whole = psutil.virtual_memory().total
        kind = TransientRunError if self.object_store_bytes < 0.9 * whole else RunError
        return kind(
            f"Ray did not start on this machine, which has {human_bytes(whole)} of memory; its object store needs "
            f"{human_bytes(self.object_store_bytes)}: {reason}",
            remedy="make the object store smaller (--set data_service.memory=1GiB), or end other processes here that "
            "use much memory",
        )


def plan_resources(recipe: Recipe) -> LocalRayResources:
    """Return the resources of a local Ray for `recipe`: at least enough CPUs for all ranks that it asks for."""
    cores = _core_count()
    match recipe.trainers:
        case "auto":
            ranks, each = min(2, cores), CPUS_PER_RANK
        case Trainers() as trainers:
            ranks, each = trainers.min, 1.0  # a core holds a rank and a data task
        case count:
            ranks, each = count, CPUS_PER_RANK
    workers = data_worker_count(recipe, cores, ranks)
    memory = int(recipe.data_service.memory)
    return LocalRayResources(max(cores, -int(-ranks * each // 1) + workers + 1), 2 * memory + (256 << 20))


def data_worker_count(recipe: Recipe, cores: float, ranks: int) -> int:
    """Return how many data tasks may run at a time in a cluster of `cores` CPUs: the recipe's number, or if that is
    "auto", half of the CPUs, at most `MAX_DATA_WORKERS` for each rank."""
    workers = recipe.data_service.workers
    return workers if workers != "auto" else max(1, min(int(cores) // 2, MAX_DATA_WORKERS * ranks))


def total_cpus(nodes: Iterable[Mapping[str, Any]]) -> float:
    """Return the number of CPUs of the living nodes among `nodes` (`ray.nodes()`)."""
    return sum(float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])


def total_gpus(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of GPUs of the living nodes among `nodes` (`ray.nodes()`)."""
    return sum(int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])


def choose_sizing(recipe: Recipe, gpus: int) -> Sizing:
    """Return the limits of the number of ranks for `recipe` in a cluster with `gpus` GPUs. There are never more ranks
    than microbatches in a step.

    `trainers: 8` means 8 ranks. `trainers: auto` means one rank for each GPU of the cluster, which may change; without
    GPUs, one for each core of this machine, at most two. A rank reserves one GPU, or without GPUs a part of a core.
    """
    useful, each = recipe.max_microbatches_per_step, {"CPU": CPUS_PER_RANK} | ({"GPU": 1.0} if gpus else {})
    trainers = recipe.trainers
    if trainers == "auto":
        trainers = Trainers() if gpus else min(2, _core_count())
    if not isinstance(trainers, Trainers):
        count = min(trainers, useful)
        return Sizing(count, count, count, wait=0.0, grow=float("inf"), each=each)
    if trainers.max == "auto":
        expected, most = trainers.min, useful if gpus else max(trainers.min, min(2, _core_count()))
    else:
        expected = most = trainers.max
    return Sizing(
        trainers.min,
        min(most, useful),
        min(expected, useful),
        trainers.wait,
        trainers.grow,
        each if gpus else {"CPU": CPUS_PER_ELASTIC_RANK},
        data_cpus=0.0 if gpus else 1.0 - CPUS_PER_ELASTIC_RANK,
    )


def _core_count() -> int:
    return os.cpu_count() or 1


_REMINDER_INTERVAL_S = 60.0  # interval of the lines that say what a start waits for

Nodes = Sequence[Mapping[str, Any]]
"""Nodes, as `ray.nodes()` returns them."""


@dataclass(frozen=True)
class WorldSizeChange:
    """A change of the number of ranks, and its cause."""

    before: int
    world: int
    cause: str


class WorldSizeTracker:
    """Decides how many ranks start, and tracks their number during one command.

    Args:
        sizing: limits of the number of ranks.
        last: number of ranks that wrote the newest checkpoint; None if there is none.
        clock: monotonic clock in seconds.

    Attributes:
        without: ids of nodes that are excluded for the rest of the command.
    """

    def __init__(self, sizing: Sizing, last: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizing, self._world, self._clock = sizing, last, clock
        self.without: frozenset[str] = frozenset()
        self._wanted = max(sizing.expected, last or 0)  # number of ranks that a start waits for
        self._first = True  # whether no group of this command has trained yet
        self._began = 0.0  # when the present group began to train
        self._asked: float | None = None  # when `ranks_to_start` was first called for this group; None while it trains
        self._granted: int | None = None  # number of ranks that were allowed to start and do not train yet
        self._failed: int | None = None  # number of ranks that were allowed to start before, but did not train
        self._told: float | None = None  # when the operator was last told what the start waits for
        self._starting: int | None = None  # number of ranks in the last message "starting ..."
        self._found = 0  # number of ranks that fit on the cluster
        self._changed = 0.0  # when `_found` last changed

    def exclude_nodes(self, nodes: Nodes, bad_nodes: frozenset[str]) -> bool:
        """Exclude as many of `bad_nodes` as the smallest number of ranks allows. Return whether all are excluded
        now."""
        self.without = nodes_to_exclude(nodes, self._sizing, self.without, bad_nodes)
        return bad_nodes <= self.without

    def exclude_failing_nodes(self, nodes: Nodes, bad_nodes: frozenset[str]) -> list[str]:
        """Exclude nodes as `exclude_nodes`. Return a line for the operator about each living node that was not excluded
        before."""
        before = self.without
        self.exclude_nodes(nodes, bad_nodes)
        added = [node for node in nodes if node["Alive"] and node["NodeID"] in self.without - before]
        return [
            f"node {node['NodeID'][:8]} ({node['NodeManagerHostname']}) is excluded: "
            f"{NODE_FAILURE_LIMIT} or more recent failures began on it"
            for node in added
        ]

    def ranks_to_start(self, nodes: Nodes) -> int | None:
        """Return how many ranks may start now; None if the start must wait: call again."""
        found, now = self._count_places(nodes), self._clock()
        self._asked = now if self._asked is None else self._asked
        self._failed, self._granted = (
            self._granted,
            rank_count(self._sizing, found, self._wanted, now - self._asked),
        )
        return self._granted

    def start_message(self) -> str | None:
        """Return a line for the operator about the last call of `ranks_to_start`; None if there is nothing to say.
        While ranks cannot start, the line is repeated every `_REMINDER_INTERVAL_S` seconds."""
        now = self._clock()
        if self._granted is not None and self._failed is None:
            known, self._starting = self._starting == self._granted, self._granted
            return None if known else f"starting {self._granted} rank{'s' if self._granted > 1 else ''}"
        if self._told is not None and now - self._told < _REMINDER_INTERVAL_S:
            return None
        self._told = now
        if self._granted is None:
            return f"waiting for machines: places for {self._found} ranks, {self._wanted_ranks_text()} wanted"
        return f"Ray could not start {self._failed} ranks: a node has just left the cluster, or other jobs fill it"

    def record_world_size(self, world: int) -> WorldSizeChange | None:
        """Record that a group of `world` ranks begins to train. Return the change of the number of ranks; None if it is
        unchanged."""
        before, first = self._world, self._first
        self._world = self._wanted = world
        self._first, self._asked, self._told, self._began = False, None, None, self._clock()
        self._granted = self._starting = None
        if before is None or before == world:
            return None
        return WorldSizeChange(before, world, world_change_cause(self._sizing, before, world, first=first))

    def should_grow(self, nodes: Nodes) -> bool:
        """Return whether the present ranks should stop so that a larger group can start. It must be called every few
        seconds, to notice changes of the cluster."""
        found, now = self._count_places(nodes), self._clock()
        if self._world is None:
            return False
        return should_grow(self._sizing, found, self._world, now - self._began, now - self._changed)

    def can_start_now(self, nodes: Nodes) -> bool:
        """Return whether the next group could start on `nodes` without waiting for machines."""
        return rank_count(self._sizing, self._count_places(nodes), self._wanted, 0.0) is not None

    def _count_places(self, nodes: Nodes) -> int:
        found = count_places(nodes, self._sizing.place, self.without)
        if found != self._found:
            self._found, self._changed = found, self._clock()
        return found

    def _wanted_ranks_text(self) -> str:
        return str(min(self._wanted, self._sizing.most)) if self._may_still_wait() else f"{self._sizing.least} at least"

    def _may_still_wait(self) -> bool:
        return self._asked is not None and self._clock() - self._asked < self._sizing.wait
