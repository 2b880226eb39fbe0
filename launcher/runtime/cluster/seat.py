"""A rank's seat: its number among the ranks, where rank 0 listens, and its GPU.

CUDA reads `CUDA_VISIBLE_DEVICES` once in a process, when it is first asked anything. Ray sets it to the one GPU that it
gives a rank, and the ranks of a node need to see the GPUs of all of them. So a rank's process first gets its seat, and
imports torch afterwards: neither this module nor what it imports may reach torch or DeepSpeed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import RunError

_KINDS = ("GPU-", "MIG-")  # of ids; others are numbers
_MIG = "MIG-"


class SeatError(RunError):
    """Ranks that cannot have their GPUs."""


@dataclass(frozen=True)
class Placement:
    """Where Ray placed a rank: node, address of the node, process, and the GPUs that it gave the process."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Seat:
    """A rank's number and address, as torch.distributed wants them.

    Attributes:
        local_rank, local_world: among the ranks of its node.
        node_rank: number of the node.
        master: host and port where rank 0 listens.
        gpus: of all ranks of the node; this one's is number `local_rank`. Numbers, or ids as NVIDIA's driver gives
            them (`GPU-...`, `MIG-...`). Empty where ranks compute on CPUs.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    master: tuple[str, int]
    gpus: tuple[str, ...]

    @property
    def shares_a_gpu(self) -> bool:
        """Whether the rank has a MIG instance, a part of a GPU."""
        return any(gpu.startswith(_MIG) for gpu in self.gpus)

    @property
    def visible(self) -> tuple[str, ...]:
        """The GPUs that the rank sees: those of its node's ranks, by which NCCL and torch connect them. CUDA shows a
        process one MIG instance at most, which must be the rank's own."""
        return (self.gpus[self.local_rank],) if self.shares_a_gpu else self.gpus

    @property
    def device(self) -> int:
        """The number of the rank's GPU among those that it sees."""
        return 0 if self.shares_a_gpu else self.local_rank

    def environment(self) -> dict[str, str]:
        """Return the variables that torch, DeepSpeed and NCCL read. torch and DeepSpeed take `LOCAL_RANK` for the
        number of the process's device."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.device,
            "LOCAL_WORLD_SIZE": self.local_world,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
        }
        gpus = self._of_gpus() if self.gpus else seeing(())
        return {name: str(value) for name, value in found.items()} | gpus

    def _of_gpus(self) -> dict[str, str]:
        # Memory is mapped in segments that grow: rows of many lengths break it into pieces that nothing fits into else.
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        found = seeing(self.visible) | {"PYTORCH_ALLOC_CONF": allocator}
        if self.shares_a_gpu:  # NCCL's guide asks for it: no instance has NVLink
            found["NCCL_MNNVL_ENABLE"] = os.environ.get("NCCL_MNNVL_ENABLE", "0")
        return found


def seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables with which a process sees just these GPUs, in this order. By default CUDA would give the
    lowest number to the fastest GPU; the driver's tools number them by PCI bus."""
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": order}


def seats(placements: Sequence[Placement], port: int) -> list[Seat]:
    """Return the seats of processes that are sorted by rank (`ordered`). `port`: free on the first process's node.

    Raises SeatError: the GPUs of a node cannot be told apart.
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
            gpus=_gpus_of([placements[number] for number in here]),
        )
        found.append(seat)
    return found


def _gpus_of(placements: Sequence[Placement]) -> tuple[str, ...]:
    """Of the ranks of one node."""
    gpus = tuple(gpu for placement in placements for gpu in placement.gpus)
    one_each = all(len(placement.gpus) == 1 for placement in placements) and len(set(gpus)) == len(gpus)
    kinds = {_kind(gpu) for gpu in gpus}
    if not gpus or (one_each and len(kinds) == 1 and None not in kinds):
        return gpus
    given = "; ".join(",".join(placement.gpus) or "none" for placement in placements)
    raise SeatError(
        f"Ray gave the ranks on node {placements[0].address} these GPUs: {given}",
        remedy="before Ray starts on that node, set CUDA_VISIBLE_DEVICES to different numbers, or to different ids "
        "as `nvidia-smi -L` lists them, or unset it",
    )


def _kind(gpu: str) -> str | None:
    """Return what CUDA takes the id for; None if for nothing."""
    if gpu.isdecimal():
        return "number"
    return next((kind for kind in _KINDS if gpu.startswith(kind)), None)


def ordered(placements: Sequence[Placement]) -> list[int]:
    """Indices of `placements` in the order of their ranks: node by node, by GPU."""
    first = {placement.node: index for index, placement in reversed(list(enumerate(placements)))}
    return sorted(
        range(len(placements)), key=lambda index: (first[placements[index].node], _number(placements[index]))
    )


def _number(placement: Placement) -> tuple[int, str, int]:
    gpu = placement.gpus[0] if placement.gpus else ""
    return (int(gpu) if gpu.isdecimal() else 0, gpu, placement.pid)
