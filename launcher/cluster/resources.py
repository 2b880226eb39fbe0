"""What a run takes of the machine or cluster it is on: ranks, data workers, memory."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.policies.elastic import Sizing, Trainers
from launcher.recipe.schema import Recipe

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


def plan_resources(recipe: Recipe) -> Resources:
    """Resources for `recipe` on this machine: there is room for as many ranks as it asks for at least."""
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
    """Data tasks at a time in a cluster of so many cores: half of them, if there are ranks that need as many."""
    asked = recipe.data_service.workers
    return asked if asked != "auto" else max(1, min(int(cores) // 2, MOST_DATA_WORKERS * ranks))


def cores_of(nodes: Iterable[Mapping[str, Any]]) -> float:
    """CPUs of the living nodes, as `ray.nodes()` tells of them."""
    return sum(float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])


def gpus_of(nodes: Iterable[Mapping[str, Any]]) -> int:
    """GPUs of the living nodes, as `ray.nodes()` tells of them."""
    return sum(int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"])


def sizing(recipe: Recipe, gpus: int) -> Sizing:
    """How many ranks `recipe` wants of a cluster with so many GPUs; never more than a step has microbatches.

    A number is that number, `auto` every GPU that there is, any time; without GPUs, as many as this machine has cores,
    two at most. A rank reserves a GPU; without GPUs a part of a core.
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
