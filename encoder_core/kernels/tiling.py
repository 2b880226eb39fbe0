"""How large the fused attention's tiles are, and how many warps compute one.

Chosen by compiling for GPUs that were not there, so that no kernel spills registers in half precision with heads up to
64 wide: `tests/bench/kernels.py` makes the table. Not timed on a GPU.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from encoder_core.kernels.operands import Inputs, Tile


class Cut(NamedTuple):
    """Queries, and keys, of a tile (a power of two, at least 16); warps and pipeline stages of its program."""

    size: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """For a kernel's launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


class Cuts(NamedTuple):
    """Of each kernel."""

    forward: Cut
    queries: Cut
    keys: Cut
    tables: Cut


def cuts_of(dtype: torch.dtype, width: int, generation: int) -> Cuts:
    """What is used for heads of this dtype and width, on GPUs of this major compute capability."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Cuts(*[Cut(16, 8, 1)] * 4)
    if width > 64:
        return Cuts(*[Cut(32, 8, 1)] * 4)
    forward = Cut(64, 8, 2) if generation >= 9 else Cut(32, 4, 2)
    return Cuts(forward, Cut(32, 4, 1), Cut(32, 4, 1), Cut(32, 8, 1))


def generation_of(device: torch.device) -> int:
    """Major compute capability; 0 where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def tile_of(x: Inputs, size: int) -> Tile:
    """Of so many queries and keys."""
    width = x.q.shape[-1]
    sums = tl.float64 if x.q.dtype == torch.float64 else tl.float32
    return Tile(size, width, max(16, 1 << (width - 1).bit_length()), sums, x.carried % 4 == 0)
