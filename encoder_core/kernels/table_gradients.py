"""Adds up the gradients of the fused attention's tables, always in the same order.

Each program of the backward kernels goes through its tiles in order and adds to sums of its own, one for each distance.
No other program adds to these, so every number is summed in a fixed order. The programs' sums are added up afterwards.
There are about as many programs as a GPU runs at once, so the memory for sums grows with the length of the longest
row, not with its square.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 2  # programs of a backward kernel that fit on one multiprocessor, by their registers
INTERPRETED_PROGRAMS = 4  # programs of a launch, for all heads together, when Triton interprets it on a CPU


class TableSums(NamedTuple):
    """Each program's sums of table gradients, in one launch: tensors on the host, pointers in a kernel.

    Attributes:
        a, b: [programs, blocks * S, N, D] in the dtype of sums, for tables A and B; None: the launch does not use it.
        c: [programs, blocks * S, N], for table C.
        lowest: smallest signed distance from a tile of keys to a tile of queries, in tiles; the first block's distance.
        blocks: number of blocks of S table rows. A pair of tiles uses two neighbouring blocks, its band.
    """

    a: Any
    b: Any
    c: Any
    lowest: int
    blocks: int


def programs_per_head(device: torch.device, heads: int, tiles: int) -> int:
    """Return the number of programs for each head, among which `tiles` are distributed."""
    at_once = INTERPRETED_PROGRAMS
    if device.type == "cuda":
        at_once = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, at_once // heads))


def zero_sums(tables: tuple[Tensor | None, ...], *, programs: int, lowest: int, blocks: int, size: int) -> TableSums:
    """Return zero sums for the gradients of tables A, B and C; None for a table that the launch does not use."""

    def zeros_for_table(table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        dtype = torch.promote_types(table.dtype, torch.float32)
        return torch.zeros((programs, blocks * size, *table.shape[1:]), dtype=dtype, device=table.device)

    a, b, c = (zeros_for_table(table) for table in tables)
    return TableSums(a, b, c, lowest, blocks)


def table_gradient(sums: Tensor, table: Tensor, first_row: int) -> Tensor:
    """Return the gradient of a table [E, ...]. `sums`: the sums of all programs, which begin at row `first_row`."""
    rows = sums.sum(0)
    skipped = max(0, -first_row)
    rows = rows[skipped : len(table) - first_row]
    gradient = torch.zeros_like(table)
    gradient[first_row + skipped : first_row + skipped + len(rows)] = rows
    return gradient


def tile_differences(
    longest: int, carried: int, size: int, *, backwards: bool, causal: bool = False
) -> tuple[int, int]:
    """Return the smallest signed distance from a tile of keys to a tile of queries, and the number of distances.

    Distances are in tiles of `size`. `backwards`: whether rows may be reversed. `causal`: whether later keys are
    hidden, so that no distance is negative.
    """
    ahead, before = (longest - 1) // size, -(-carried // size)
    lowest = 0 if causal else -ahead - (before if backwards else 0)
    return lowest, ahead + before - lowest + 1
