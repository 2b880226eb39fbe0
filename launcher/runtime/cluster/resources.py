"""How many ranks, data workers and bytes of memory a run takes on its machine or cluster."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from launcher.errors import RunError, TryAgain
from launcher.format import human_bytes
from launcher.runtime.policies.elastic import Sizing, Trainers
from launcher.runtime.recipe.schema import Recipe

TRAINER_CPUS = 0.25  # ranks reserve little: on a small machine data tasks must still find a place beside them
ELASTIC_CPUS = (
    0.75  # where a machine's cores say how many ranks it can have: a core holds one, and a data task
)
MOST_DATA_WORKERS = 4  # a rank


@dataclass(frozen=True)
class Resources:
    """Counts, and bytes.

    Attributes:
        local_cpus: logical CPUs of a Ray started here.
        object_store_bytes: of a Ray started here; what the data service may fill, and room for Ray itself.
    """

    local_cpus: int
    object_store_bytes: int

    def too_large(self, reason: str) -> RunError:
        """Return why a Ray cannot be started here, and what to do; `reason` is Ray's own. It may pass by itself,
        unless the machine could not hold so much if nothing else ran.
        """
        whole = psutil.virtual_memory().total
        kind = TryAgain if self.object_store_bytes < 0.9 * whole else RunError
        return kind(
            f"Ray did not start on this machine of {human_bytes(whole)}, of which its object store would have "
            f"{human_bytes(self.object_store_bytes)}: {reason}",
            remedy="let less data wait there: --set data_service.memory=1GiB; or end what else takes memory here",
        )


def plan_resources(recipe: Recipe) -> Resources:
    """Resources for `recipe` on this machine, with room for at least the ranks that it asks for."""
    cores = _cores()
    match recipe.trainers:
        case "auto":
            ranks, each = min(2, cores), TRAINER_CPUS
        case Trainers() as trainers:
            ranks, each = trainers.min, ELASTIC_CPUS
        case count:
            ranks, each = count, TRAINER_CPUS
    workers = data_workers(recipe, cores, ranks)
    memory = int(recipe.data_service.memory)
    return Resources(max(cores, -int(-ranks * each // 1) + workers + 1), 2 * memory + (256 << 20))


def data_workers(recipe: Recipe, cores: float, ranks: int) -> int:
    """Return how many data tasks run at a time in a cluster of `cores` CPUs: half of the CPUs, or fewer if the ranks
    need fewer."""
    asked = recipe.data_service.workers
    return asked if asked != "auto" else max(1, min(int(cores) // 2, MOST_DATA_WORKERS * ranks))


def cores_of(nodes: Iterable[Mapping[str, Any]]) -> float:
    """CPUs of the nodes of `ray.nodes()` that are alive."""
    return sum(float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])


def gpus_of(nodes: Iterable[Mapping[str, Any]]) -> int:
    """GPUs of the nodes of `ray.nodes()` that are alive."""
    return sum(int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])


def sizing(recipe: Recipe, gpus: int) -> Sizing:
    """Return how many ranks `recipe` may have in a cluster with `gpus` GPUs; never more than a step has microbatches.

    `trainers: 8` means 8. `trainers: auto` means every GPU that there is at any time; without GPUs, as many ranks as
    this machine has cores, at most two. A rank reserves one GPU, or without GPUs a part of a core.
    """
    useful, each = recipe.microbatches, {"CPU": TRAINER_CPUS} | ({"GPU": 1.0} if gpus else {})
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
        each if gpus else {"CPU": ELASTIC_CPUS},
    )


def _cores() -> int:
    return os.cpu_count() or 1
