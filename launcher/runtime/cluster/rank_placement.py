"""A rank's seat: its rank number, the address of rank 0, and its GPU.

CUDA reads `CUDA_VISIBLE_DEVICES` once in a process, at its first call. Ray sets the variable to the one GPU of the
rank, but each rank must see the GPUs of all ranks of its node. So a rank's process first gets its seat, and imports
torch afterwards: neither this module nor a module that it imports may import torch or DeepSpeed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import RunError

_ID_PREFIXES = ("GPU-", "MIG-")  # prefixes of GPU ids; GPUs are named by id or by index
_MIG_ID_PREFIX = "MIG-"  # prefix of the ids of MIG instances, which are parts of a GPU


class SeatError(RunError):
    """A rank cannot use the GPU that Ray gave it."""


@dataclass(frozen=True)
class Placement:
    """Where Ray started a process: node id, address of the node, process id, and the GPUs given to the process."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Seat:
    """A rank's numbers and the address of rank 0, as torch.distributed needs them, and the GPUs of its node.

    Attributes:
        rank, world: number of the rank, and number of all ranks.
        local_rank, local_world: the same for the ranks of its node only.
        node_rank: number of its node.
        master: host and port where rank 0 listens.
        gpus: GPUs of all ranks of the node, as indices or as ids of NVIDIA's driver (`GPU-...`, `MIG-...`). The GPU of
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
        """Whether the rank has a MIG instance: a part of a GPU instead of a whole one."""
        return any(gpu.startswith(_MIG_ID_PREFIX) for gpu in self.gpus)

    @property
    def visible_gpus(self) -> tuple[str, ...]:
        """The GPUs that the rank sees: those of all ranks of its node, because NCCL and torch need them to connect the
        ranks. With MIG, only the rank's own: CUDA shows a process at most one MIG instance."""
        return (self.gpus[self.local_rank],) if self.shares_gpu else self.gpus

    @property
    def device_index(self) -> int:
        """Index of the rank's GPU in `visible_gpus`."""
        return 0 if self.shares_gpu else self.local_rank

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torch, DeepSpeed and NCCL read. `LOCAL_RANK` is `device_index`, because
        torch and DeepSpeed use it as the index of the CUDA device."""
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
        # Expandable segments reduce fragmentation of GPU memory when row lengths vary.
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        found = visible_gpu_variables(self.visible_gpus) | {"PYTORCH_ALLOC_CONF": allocator}
        if self.shares_gpu:  # as NCCL's guide says: MIG instances have no NVLink
            found["NCCL_MNNVL_ENABLE"] = os.environ.get("NCCL_MNNVL_ENABLE", "0")
        return found


def visible_gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that make exactly `gpus` visible to CUDA, in this order. Indices count GPUs by
    PCI bus, as `nvidia-smi` does; by default, CUDA counts the fastest GPU first."""
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": order}


def assign_seats(placements: Sequence[Placement], port: int) -> list[Seat]:
    """Return the seat of each process; `placements` are in the order of ranks (`rank_order`). `port`: free port on the
    node of the first process, where rank 0 will listen.

    Raises SeatError if two ranks of a node have the same GPU, or GPUs are named in different ways.
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
        f"the ranks on node {placements[0].address} need one GPU each, but Ray gave them: {given}",
        remedy="before Ray starts on that node, unset CUDA_VISIBLE_DEVICES, or set it to different indices, or to "
        "different ids as `nvidia-smi -L` lists them",
    )


def _gpu_name_kind(gpu: str) -> str | None:
    """Return the kind of a GPU's name: "number", or its prefix in `_ID_PREFIXES`; None if CUDA does not accept it."""
    if gpu.isdecimal():
        return "number"
    return next((kind for kind in _ID_PREFIXES if gpu.startswith(kind)), None)


def rank_order(placements: Sequence[Placement]) -> list[int]:
    """Return the indices of `placements` in the order of ranks: node by node, and by GPU within a node."""
    first = {placement.node: index for index, placement in reversed(list(enumerate(placements)))}
    return sorted(
        range(len(placements)),
        key=lambda index: (first[placements[index].node], _rank_sort_key(placements[index])),
    )


def _rank_sort_key(placement: Placement) -> tuple[int, str, int]:
    gpu = placement.gpus[0] if placement.gpus else ""
    return (int(gpu) if gpu.isdecimal() else 0, gpu, placement.pid)
