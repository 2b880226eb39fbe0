"""The size of the fused attention's tiles, and the number of warps and pipeline stages for each.

For heads of width 33 to 64 in half precision on Hopper, these are the fastest of up to fourteen tilings that one H200
ran (Triton 3.6.0, 32 rows of 512, 12 heads of 64, bf16, dropout 0.1). There four warps multiply by wgmma. With relative
terms, tiles of 64 spill registers and are still up to twice as fast as tiles of 32, which do not. The kernels have not
been timed since they changed: they compute deltas themselves, need fewer comparisons for dropout, and add up the
gradients of tables. For the last change, XLNet's `queries_kernel` was given one stage: with two, its shared memory
leaves no room for a second program.

All other tilings were chosen without running them, by compiling for each GPU: of the tilings that spill no registers,
the one with the fewest instructions per score. `tests/encoder_core/kernels/compiled.csv` lists the compilers' figures.

On Blackwell, Triton 3.6 to 3.8 miscompile a loop that adds two products to one sum, if tensor memory multiplies them
(triton-lang/triton#10821): that is, in tiles of 64 and more. The gradients through tables are such sums, so their
kernels have smaller tiles there.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from encoder_core.kernels.operands import FUSED_MULTIPLY_ADDS, KernelInputs, Tile


class Tiling(NamedTuple):
    """A kernel's tile size (queries, and keys; a power of two, at least 16), its warps and its pipeline stages."""

    size: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options for this tiling."""
        return {"num_warps": self.warps, "num_stages": self.stages, **FUSED_MULTIPLY_ADDS}


class Tilings(NamedTuple):
    """The tilings of the forward kernel and of the two backward kernels."""

    forward: Tiling
    queries: Tiling
    keys: Tiling


_HOPPER, _TIMED_WIDTHS = 9, range(33, 65)  # major compute capability and head widths of the timed tilings
# Major compute capabilities with 227 KiB of shared memory per program and warp-group matrix products.
_HOPPER_GENERATIONS = (9, 10)


def choose_tilings(
    dtype: torch.dtype,
    width: int,
    generation: int,
    *,
    has_relative_terms: bool = True,
    has_table_b: bool = True,
    has_table_c: bool = False,
) -> Tilings:
    """Return the tilings for heads of this dtype and width, on GPUs of major compute capability `generation`.

    `has_relative_terms`: whether scores have terms besides q . k. `has_table_b`, `has_table_c`: whether these include
    tables B and C.
    """
    half, wide, large = (
        dtype in (torch.bfloat16, torch.float16),
        width > 64,
        generation in _HOPPER_GENERATIONS,
    )
    if half and generation == _HOPPER and width in _TIMED_WIDTHS:
        return _timed_configs(has_relative_terms=has_relative_terms, has_table_b=has_table_b)
    match half, has_relative_terms, wide:
        case False, _, _:  # full precision: each product takes three TF32 passes
            return Tilings(*[Tiling(16 if has_relative_terms or wide else 32, 8, 1)] * 3)
        case _, True, True:
            return Tilings(Tiling(32, 8, 2), Tiling(32, 8, 2), Tiling(16, 4, 1))
        case _, True, False:
            forward = Tiling(64, 8, 2) if large and not has_table_c else Tiling(32, 4, 2)
            return Tilings(forward, Tiling(32, 4, 2), Tiling(32, 4, 1))
        case _, _, True if large:
            return Tilings(Tiling(64, 4, 2), Tiling(64, 4, 1), Tiling(64 if generation == 10 else 32, 4, 2))
        case _, _, True:
            return Tilings(Tiling(64, 8, 2), Tiling(64, 8, 2), Tiling(64, 8, 2))
        case _ if large:
            return Tilings(Tiling(64, 4, 2), Tiling(64, 4, 2), Tiling(64, 4, 2))
    return Tilings(Tiling(64, 8, 1), Tiling(64, 8, 1), Tiling(32, 4, 2))


def _timed_configs(*, has_relative_terms: bool, has_table_b: bool) -> Tilings:
    """Return the fastest tilings on an H200; XLNet's `queries_kernel` alone was not timed."""
    if not has_relative_terms:
        return Tilings(Tiling(64, 4, 3), Tiling(64, 4, 3), Tiling(64, 4, 3))
    if has_table_b:  # DeBERTa
        return Tilings(Tiling(64, 4, 1), Tiling(64, 4, 1), Tiling(64, 4, 1))
    return Tilings(Tiling(64, 4, 2), Tiling(64, 4, 1), Tiling(64, 4, 1))  # XLNet


def compute_generation(device: torch.device) -> int:
    """Return the GPU's major compute capability; 0 on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def make_tile(x: KernelInputs, size: int) -> Tile:
    """Return the compile-time constants of a kernel whose tiles have `size` queries and keys."""
    width = x.q.shape[-1]
    sums = tl.float64 if x.q.dtype == torch.float64 else tl.float32
    return Tile(size, width, max(16, 1 << (width - 1).bit_length()), sums, x.carried % 4 == 0)
