"""Selects the CUDA device of a rank."""

import torch

from launcher.runtime.cluster.rank_placement import Seat, SeatError

MIN_NCCL_VERSION_FOR_MIG = (2, 31)
"""The first NCCL version whose guide allows several MIG instances in one communicator."""


class DeviceMissing(Exception):
    """CUDA does not show a rank the GPUs that it was assigned (`Seat.visible_gpus`)."""


def select_device(seat: Seat) -> None:
    """Make the rank's GPU the current CUDA device of this process.

    Raises:
        DeviceMissing: CUDA shows fewer or more GPUs than `seat.visible_gpus`. A GPU may have failed; a restart can use
            another node.
        SeatError: several ranks have MIG instances on this machine, and this NCCL version does not support that.
    """
    if not seat.gpus:
        return
    if seat.shares_gpu and seat.local_world > 1 and (nccl := _nccl_version()) < MIN_NCCL_VERSION_FOR_MIG:
        raise SeatError(
            f"{seat.local_world} ranks have MIG instances of one machine, which NCCL {_version_text(nccl)} "
            "does not support",
            remedy="start one rank on each machine, or use whole GPUs, or install a torch with NCCL "
            f"{_version_text(MIN_NCCL_VERSION_FOR_MIG)} or later",
        )
    found = torch.cuda.device_count()
    if found != len(seat.visible_gpus):
        raise DeviceMissing(
            f"CUDA shows rank {seat.rank} {found} GPU(s) of CUDA_VISIBLE_DEVICES={','.join(seat.visible_gpus)}: see "
            "whether one has failed (nvidia-smi). If MIG divides the GPUs, set the variable to MIG instances before "
            "Ray starts"
        )
    torch.cuda.set_device(seat.device_index)


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
