"""What a run takes of the machine or cluster it is on: ranks, data workers, memory."""

import os
from dataclasses import dataclass

import torch

from launcher.recipe import Recipe

TRAINER_CPUS = 0.25  # ranks reserve little: on a small machine data tasks must still find a place beside them


@dataclass(frozen=True)
class Resources:
    """Counts, and bytes.

    Attributes:
        trainers: ranks.
        gpus_per_trainer: 1 where there are GPUs, else 0.
        data_workers: data tasks at a time.
        local_cpus: logical CPUs of a Ray started here.
        object_store_bytes: of a Ray started here; what the data service may fill, and room for Ray itself.
    """

    trainers: int
    gpus_per_trainer: int
    data_workers: int
    local_cpus: int
    object_store_bytes: int

    def per_trainer(self) -> dict[str, float]:
        return {"CPU": TRAINER_CPUS} | ({"GPU": self.gpus_per_trainer} if self.gpus_per_trainer else {})


def plan_resources(recipe: Recipe) -> Resources:
    """Resources for `recipe` on this machine: a rank per GPU, or per core (two at most) without GPUs."""
    cores = os.cpu_count() or 1
    gpus = torch.cuda.device_count()
    trainers = recipe.trainers if recipe.trainers != "auto" else (gpus or min(2, cores))
    workers = recipe.data_service.workers if recipe.data_service.workers != "auto" else max(1, cores // 2)
    needed = -(-trainers * TRAINER_CPUS // 1) + workers
    memory = int(recipe.data_service.memory)
    return Resources(trainers, min(gpus, 1), workers, max(cores, int(needed) + 1), 2 * memory + (256 << 20))
