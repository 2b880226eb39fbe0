"""The resources of a run on its machine or cluster (ranks, data workers, CPUs and memory), and how many ranks train
throughout a command. `launcher.runtime.policies.elastic` decides how many may start."""

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
from launcher.runtime.recipe.schema import Recipe

# Ranks reserve little: on a small machine data tasks must still find a place beside them.
CPUS_PER_RANK = 0.25
# Where the number of ranks follows the machine's cores, each core holds a rank and a data task.
CPUS_PER_ELASTIC_RANK = 0.75
MAX_DATA_WORKERS = 4  # data workers for each rank


@dataclass(frozen=True)
class LocalRayResources:
    """The resources with which Ray is started on this machine.

    Attributes:
        local_cpus: number of logical CPUs.
        object_store_bytes: size of the object store in bytes: twice the memory of the data service, and room for Ray
            itself.
    """

    local_cpus: int
    object_store_bytes: int

    def too_large_error(self, reason: str) -> RunError:
        """Return the error for a Ray that cannot be started here because of `reason`, Ray's own text. It is a
        TransientRunError if the machine could hold so much memory when nothing else runs.
        """
        whole = psutil.virtual_memory().total
        kind = TransientRunError if self.object_store_bytes < 0.9 * whole else RunError
        return kind(
            f"Ray did not start on this machine, which has {human_bytes(whole)} of memory; its object store needs "
            f"{human_bytes(self.object_store_bytes)}: {reason}",
            remedy="make the object store smaller (--set data_service.memory=1GiB), or end other processes here that "
            "use much memory",
        )


def plan_resources(recipe: Recipe) -> LocalRayResources:
    """Return the resources for `recipe` on this machine, enough for at least the ranks that it asks for."""
    cores = _core_count()
    match recipe.trainers:
        case "auto":
            ranks, each = min(2, cores), CPUS_PER_RANK
        case Trainers() as trainers:
            ranks, each = trainers.min, 1.0  # with its data task
        case count:
            ranks, each = count, CPUS_PER_RANK
    workers = data_worker_count(recipe, cores, ranks)
    memory = int(recipe.data_service.memory)
    return LocalRayResources(max(cores, -int(-ranks * each // 1) + workers + 1), 2 * memory + (256 << 20))


def data_worker_count(recipe: Recipe, cores: float, ranks: int) -> int:
    """Return how many data tasks run at a time in a cluster of `cores` CPUs: half of the CPUs, or fewer if the ranks
    need fewer."""
    workers = recipe.data_service.workers
    return workers if workers != "auto" else max(1, min(int(cores) // 2, MAX_DATA_WORKERS * ranks))


def total_cpus(nodes: Iterable[Mapping[str, Any]]) -> float:
    """Return the number of CPUs of the living nodes of `ray.nodes()`."""
    return sum(float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])


def total_gpus(nodes: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of GPUs of the living nodes of `ray.nodes()`."""
    return sum(int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])


def choose_sizing(recipe: Recipe, gpus: int) -> Sizing:
    """Return how many ranks `recipe` may have in a cluster with `gpus` GPUs; never more than a step has microbatches.

    `trainers: 8` means 8 ranks. `trainers: auto` means a rank for every GPU that the cluster has at any time; without
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


_REMINDER_INTERVAL_S = 60.0  # interval of the lines that tell the operator what a start waits for

Nodes = Sequence[Mapping[str, Any]]
"""Nodes, as `ray.nodes()` returns them."""


@dataclass(frozen=True)
class WorldSizeChange:
    """A change of the number of ranks, and its cause."""

    before: int
    world: int
    cause: str


class WorldSizeTracker:
    """A tracker of the number of ranks throughout one command.

    Args:
        sizing: the numbers of ranks that the run may have.
        last: number of ranks that wrote the newest checkpoint; None if there is none.
        clock: function that returns seconds.

    Attributes:
        without: nodes on which no rank may run any more.
    """

    def __init__(self, sizing: Sizing, last: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizing, self._world, self._clock = sizing, last, clock
        self.without: frozenset[str] = frozenset()
        self._wanted = max(sizing.expected, last or 0)
        self._first = True
        self._began = 0.0
        self._asked: float | None = None  # time when ranks were first requested; None while a group trains
        self._granted: int | None = None  # number of ranks that may start and do not train yet
        self._failed: int | None = None  # number of ranks that were allowed to start and did not
        self._told: float | None = None
        self._starting: int | None = None  # number of starting ranks in the last message to the operator
        self._found = 0
        self._changed = 0.0  # time when the number of places last changed

    def exclude_nodes(self, nodes: Nodes, bad_nodes: frozenset[str]) -> bool:
        """Exclude the `bad_nodes` nodes, as far as enough places for ranks remain. Return whether all are excluded."""
        self.without = nodes_to_exclude(nodes, self._sizing, self.without, bad_nodes)
        return bad_nodes <= self.without

    def ranks_to_start(self, nodes: Nodes) -> int | None:
        """Return how many ranks may start now; None: ask again later."""
        found, now = self._count_places(nodes), self._clock()
        self._asked = now if self._asked is None else self._asked
        self._failed, self._granted = (
            self._granted,
            rank_count(self._sizing, found, self._wanted, now - self._asked),
        )
        return self._granted

    def start_message(self) -> str | None:
        """Return the line for the operator after a call of `ranks_to_start`; None if there is nothing new. That
        ranks start is told once, that they cannot start is told every `_REMINDER_INTERVAL_S` seconds."""
        now = self._clock()
        if self._granted is not None and self._failed is None:
            known, self._starting = self._starting == self._granted, self._granted
            return None if known else f"starting {self._granted} rank{'s' if self._granted > 1 else ''}"
        if self._told is not None and now - self._told < _REMINDER_INTERVAL_S:
            return None
        self._told = now
        if self._granted is None:
            return f"waiting for machines: places for {self._found} ranks, {self._target_text()} wanted"
        return f"Ray could not start {self._failed} ranks: a node has just left the cluster, or other jobs fill it"

    def record_world_size(self, world: int) -> WorldSizeChange | None:
        """Note that a group of `world` ranks begins to train. Return the change to record; None if the number is the
        same as before."""
        before, first = self._world, self._first
        self._world = self._wanted = world
        self._first, self._asked, self._told, self._began = False, None, None, self._clock()
        self._granted = self._starting = None
        if before is None or before == world:
            return None
        return WorldSizeChange(before, world, world_change_cause(self._sizing, before, world, first=first))

    def should_grow(self, nodes: Nodes) -> bool:
        """Return whether the present ranks should end at a checkpoint so that more can start. It is called every few
        seconds."""
        found, now = self._count_places(nodes), self._clock()
        if self._world is None:
            return False
        return should_grow(self._sizing, found, self._world, now - self._began, now - self._changed)

    def can_start_now(self, nodes: Nodes) -> bool:
        """Return whether the next group could start without waiting for places."""
        return rank_count(self._sizing, self._count_places(nodes), self._wanted, 0.0) is not None

    def _count_places(self, nodes: Nodes) -> int:
        found = count_places(nodes, self._sizing.place, self.without)
        if found != self._found:
            self._found, self._changed = found, self._clock()
        return found

    def _target_text(self) -> str:
        return str(min(self._wanted, self._sizing.most)) if self._may_still_wait() else f"{self._sizing.least} at least"

    def _may_still_wait(self) -> bool:
        return self._asked is not None and self._clock() - self._asked < self._sizing.wait
