"""Where the fused attention's gradients by its tables are added up, without sums of arbitrary order.

The kernels by queries and by keys go through tiles in order. Each of their programs has rows of its own for all
distances, to which no other program adds, so that every number is summed in one order. The programs' rows are added
up afterwards. There are about as many programs as a GPU runs at once, so that the rows grow with the longest row,
and not with its square.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 2  # registers leave room for two of either kernel
INTERPRETED_PROGRAMS = 4  # for all heads together, without a GPU


class TableSums(NamedTuple):
    """The sums of a launch's programs: tensors on the host, pointers in a kernel.

    Attributes:
        a, b: [programs, blocks * S, N, D] in the dtype of sums, for tables A and B; None: not of this launch.
        c: [programs, blocks * S, N], for table C.
        lowest: difference of the first positions of two tiles, queries less keys, at which rows begin, in tiles.
        blocks: number of times S rows. Two tiles have a band of two blocks.
    """

    a: Any
    b: Any
    c: Any
    lowest: int
    blocks: int


def programs_per_head(device: torch.device, heads: int, tiles: int) -> int:
    """Return the number of programs for each head, when `tiles` are shared out among them."""
    at_once = INTERPRETED_PROGRAMS
    if device.type == "cuda":
        at_once = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, at_once // heads))


def zero_sums(tables: tuple[Tensor | None, ...], *, programs: int, lowest: int, blocks: int, size: int) -> TableSums:
    """Return sums of 0 for the gradients by tables A, B and C; None: not of this launch."""

    def zeros_for_table(table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        dtype = torch.promote_types(table.dtype, torch.float32)
        return torch.zeros((programs, blocks * size, *table.shape[1:]), dtype=dtype, device=table.device)

    a, b, c = (zeros_for_table(table) for table in tables)
    return TableSums(a, b, c, lowest, blocks)


def table_gradient(sums: Tensor, table: Tensor, first_row: int) -> Tensor:
    """Return the gradient by a table [E, ...] from the sums of all programs, which begin at its row `first_row`."""
    rows = sums.sum(0)
    skipped = max(0, -first_row)
    rows = rows[skipped : len(table) - first_row]
    gradient = torch.zeros_like(table)
    gradient[first_row + skipped : first_row + skipped + len(rows)] = rows
    return gradient


def tile_differences(
    longest: int, carried: int, size: int, *, backwards: bool, causal: bool = False
) -> tuple[int, int]:
    """Return the first difference of positions, in tiles of `size`, and the number of differences.

    `causal`: no query sees a later key, so that no difference is negative.
    """
    ahead, before = (longest - 1) // size, -(-carried // size)
    lowest = 0 if causal else -ahead - (before if backwards else 0)
    return lowest, ahead + before - lowest + 1
