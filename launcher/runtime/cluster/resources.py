"""The resources of a run on its machine or cluster: ranks, data workers, CPUs and memory."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from launcher.errors import RunError, TransientRunError
from launcher.output import human_bytes
from launcher.runtime.policies.elastic import Sizing, Trainers
from launcher.runtime.recipe.schema import Recipe

# Ranks reserve little: on a small machine data tasks must still find a place beside them.
CPUS_PER_RANK = 0.25
# Where the number of ranks follows the machine's cores, each core holds a rank and a data task.
CPUS_PER_ELASTIC_RANK = 0.75
MAX_DATA_WORKERS = 4  # data workers for each rank


@dataclass(frozen=True)
class Resources:
    """The resources with which Ray is started on this machine.

    Attributes:
        local_cpus: number of logical CPUs.
        object_store_bytes: size of the object store in bytes: twice the memory of the data service, and room for Ray
            itself.
    """

    local_cpus: int
    object_store_bytes: int

    def too_large(self, reason: str) -> RunError:
        """Return the error for a Ray that cannot be started here because of `reason`, Ray's own text. It is a TryAgain
        if the machine could hold so much memory when nothing else runs.
        """
        whole = psutil.virtual_memory().total
        kind = TransientRunError if self.object_store_bytes < 0.9 * whole else RunError
        return kind(
            f"Ray did not start on this machine, which has {human_bytes(whole)} of memory; its object store needs "
            f"{human_bytes(self.object_store_bytes)}: {reason}",
            remedy="make the object store smaller (--set data_service.memory=1GiB), or end other processes here that "
            "use much memory",
        )


def plan_resources(recipe: Recipe) -> Resources:
    """Return the resources for `recipe` on this machine, enough for at least the ranks that it asks for."""
    cores = _cores()
    match recipe.trainers:
        case "auto":
            ranks, each = min(2, cores), CPUS_PER_RANK
        case Trainers() as trainers:
            ranks, each = trainers.min, CPUS_PER_ELASTIC_RANK
        case count:
            ranks, each = count, CPUS_PER_RANK
    workers = data_workers(recipe, cores, ranks)
    memory = int(recipe.data_service.memory)
    return Resources(max(cores, -int(-ranks * each // 1) + workers + 1), 2 * memory + (256 << 20))


def data_workers(recipe: Recipe, cores: float, ranks: int) -> int:
    """Return how many data tasks run at a time in a cluster of `cores` CPUs: half of the CPUs, or fewer if the ranks
    need fewer."""
    asked = recipe.data_service.workers
    return asked if asked != "auto" else max(1, min(int(cores) // 2, MAX_DATA_WORKERS * ranks))


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
    useful, each = recipe.microbatches, {"CPU": CPUS_PER_RANK} | ({"GPU": 1.0} if gpus else {})
    trainers = recipe.trainers
    if trainers == "auto":
        trainers = Trainers() if gpus else min(2, _cores())
    if not isinstance(trainers, Trainers):
        count = min(trainers, useful)
        return Sizing(count, count, count, wait=0.0, grow=float("inf"), each=each)
    if trainers.max == "auto":
        expected, most = trainers.min, useful if gpus else max(trainers.min, min(2, _cores()))
    else:
        expected = most = trainers.max
    return Sizing(
        trainers.min,
        min(most, useful),
        min(expected, useful),
        trainers.wait,
        trainers.grow,
        each if gpus else {"CPU": CPUS_PER_ELASTIC_RANK},
    )


def _cores() -> int:
    return os.cpu_count() or 1
