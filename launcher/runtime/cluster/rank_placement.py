"""A rank's seat: its number among the ranks, the address where rank 0 listens, and its GPU.

CUDA reads `CUDA_VISIBLE_DEVICES` once in a process, at its first call. Ray sets the variable to the one GPU of the
rank, but each rank must see the GPUs of all ranks of its node. So a rank's process first gets its seat, and imports
torch afterwards: neither this module nor a module that it imports may import torch or DeepSpeed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import RunError

_ID_PREFIXES = ("GPU-", "MIG-")  # beginnings of ids; other names of GPUs are numbers
_MIG_ID_PREFIX = "MIG-"


class SeatError(RunError):
    """The error of ranks that cannot use the GPUs that Ray gave them."""


@dataclass(frozen=True)
class Placement:
    """The place that Ray gave a rank: node, address of the node, process, and the GPUs of the process."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Seat:
    """A rank's numbers and address, as torch.distributed needs them, and the GPUs of its node.

    Attributes:
        rank, world: number of the rank, and how many ranks there are.
        local_rank, local_world: the same among the ranks of its node.
        node_rank: number of the node.
        master: host and port where rank 0 listens.
        gpus: GPUs of all ranks of the node, as numbers or as ids of NVIDIA's driver (`GPU-...`, `MIG-...`). The GPU of
            this rank is at index `local_rank`. Empty if ranks compute on CPUs.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    master: tuple[str, int]
    gpus: tuple[str, ...]

    @property
    def shares_gpu(self) -> bool:
        """Whether the rank has a MIG instance, a part of a GPU."""
        return any(gpu.startswith(_MIG_ID_PREFIX) for gpu in self.gpus)

    @property
    def visible_gpus(self) -> tuple[str, ...]:
        """The GPUs that the rank sees: those of all ranks of its node, since NCCL and torch need them all to connect
        the ranks. CUDA shows a process at most one MIG instance, which must be the rank's own."""
        return (self.gpus[self.local_rank],) if self.shares_gpu else self.gpus

    @property
    def device_index(self) -> int:
        """The number of the rank's GPU among those that it sees."""
        return 0 if self.shares_gpu else self.local_rank

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torch, DeepSpeed and NCCL read. `LOCAL_RANK` is `device_index`, because
        torch and DeepSpeed use it as the number of the process's device."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.device_index,
            "LOCAL_WORLD_SIZE": self.local_world,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
        }
        gpus = self._gpu_variables() if self.gpus else visible_gpu_variables(())
        return {name: str(value) for name, value in found.items()} | gpus

    def _gpu_variables(self) -> dict[str, str]:
        # With expandable segments, rows of many lengths do not fragment the GPU's memory.
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        found = visible_gpu_variables(self.visible_gpus) | {"PYTORCH_ALLOC_CONF": allocator}
        if self.shares_gpu:  # NCCL's guide asks for this, because no MIG instance has NVLink
            found["NCCL_MNNVL_ENABLE"] = os.environ.get("NCCL_MNNVL_ENABLE", "0")
        return found


def visible_gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which a process sees exactly these GPUs, in this order. GPUs are numbered
    by PCI bus, as the driver's tools do it. CUDA's default gives the lowest number to the fastest GPU."""
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": order}


def assign_seats(placements: Sequence[Placement], port: int) -> list[Seat]:
    """Return the seats of processes that are sorted by rank (`rank_order`). `port`: a free port of the first process's
    node, where rank 0 will listen.

    Raises SeatError if the GPUs of a node cannot be told apart.
    """
    nodes = list(dict.fromkeys(placement.node for placement in placements))
    found = []
    for rank, placement in enumerate(placements):
        here = [number for number, other in enumerate(placements) if other.node == placement.node]
        seat = Seat(
            rank=rank,
            world=len(placements),
            local_rank=here.index(rank),
            local_world=len(here),
            node_rank=nodes.index(placement.node),
            master=(placements[0].address, port),
            gpus=_node_gpus([placements[number] for number in here]),
        )
        found.append(seat)
    return found


def _node_gpus(placements: Sequence[Placement]) -> tuple[str, ...]:
    gpus = tuple(gpu for placement in placements for gpu in placement.gpus)
    one_each = all(len(placement.gpus) == 1 for placement in placements) and len(set(gpus)) == len(gpus)
    kinds = {_gpu_name_kind(gpu) for gpu in gpus}
    if not gpus or (one_each and len(kinds) == 1 and None not in kinds):
        return gpus
    given = "; ".join(",".join(placement.gpus) or "none" for placement in placements)
    raise SeatError(
        f"Ray gave the ranks on node {placements[0].address} these GPUs: {given}",
        remedy="before Ray starts on that node, set CUDA_VISIBLE_DEVICES to different numbers, or to different ids "
        "as `nvidia-smi -L` lists them, or unset it",
    )


def _gpu_name_kind(gpu: str) -> str | None:
    """Return how CUDA reads the name of a GPU: as a number, or as one of `_ID_PREFIXES`; None if it cannot read it."""
    if gpu.isdecimal():
        return "number"
    return next((kind for kind in _ID_PREFIXES if gpu.startswith(kind)), None)


def rank_order(placements: Sequence[Placement]) -> list[int]:
    """Return the indices of `placements` in the order of their ranks: node by node, on each node by GPU."""
    first = {placement.node: index for index, placement in reversed(list(enumerate(placements)))}
    return sorted(
        range(len(placements)),
        key=lambda index: (first[placements[index].node], _rank_sort_key(placements[index])),
    )


def _rank_sort_key(placement: Placement) -> tuple[int, str, int]:
    gpu = placement.gpus[0] if placement.gpus else ""
    return (int(gpu) if gpu.isdecimal() else 0, gpu, placement.pid)
