"""StableAdamW's update of flat tensors, in which parameters lie end to end, by three kernels.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  squares = sum over a parameter of (g / max(sqrt(v'), eps))^2
    w = w - lr / max(1, sqrt(squares / size)) (m' / (sqrt(v') + eps) + wd w)

g is the gradient, w the weights, wd the weight decay; m' and v' are the moments m and v, corrected for bias. The first
kernel updates the moments and sums the squares of one block in fp64, the second adds up the blocks of each range (the
elements of one parameter), the third updates the weights. Before the third, ranks may add up `squares`. There are no
atomics: sums have a fixed order, so the result has the same bits every time.

Results are rounded like those of torch's GPU operations: each multiply-add that torch fuses is written as one here, and
the compiler may fuse no others. So moments have the same bits as torch's. Weights differ only where the sums of
squares, added in another order, round to another clipping factor.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_ELEMENTS = 2048  # elements of a block; constant, so that the kernel trial compiles all that training needs
_SUMMED_BLOCKS = 1024  # number of blocks whose sums `squares_kernel` adds at a time
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # launch options
State = Mapping[str, Tensor]  # the optimizer's state of a tensor: its moments, `exp_avg` and `exp_avg_sq`
Group = Mapping[str, Any]  # settings of an optimizer's parameter group: `lr`, `betas`, `eps` and so on


class Blocks(NamedTuple):
    """The blocks of a flat tensor, in which each parameter (or its part there) has a range of elements.

    Attributes:
        pieces: for each block: its first element, the end of its range, and number and size of its parameter.
        ranges: for each range: its first block, the end of its blocks, and the number of its parameter.
    """

    pieces: Int[Tensor, "blocks 4"]
    ranges: Int[Tensor, "ranges 3"]


def split_into_blocks(ranges: Iterable[tuple[int, int, int, int]], device: torch.device) -> Blocks:
    """Split ranges into blocks. A range is given by first element, end, and number and size of its parameter."""
    pieces, edges = [torch.empty(0, 4, dtype=torch.int64)], list[tuple[int, int, int]]()
    for start, *rest in (its for its in ranges if its[0] < its[1]):
        firsts = torch.arange(start, rest[0], BLOCK_ELEMENTS)
        pieces.append(torch.stack([firsts, *(torch.full_like(firsts, number) for number in rest)], 1))
        before = edges[-1][1] if edges else 0
        edges.append((before, before + len(firsts), rest[1]))
    edge_table = torch.tensor(edges, dtype=torch.int64).view(-1, 3)
    return Blocks(torch.cat(pieces).to(device), edge_table.to(device))


@triton.jit
def moments_kernel(
    gradient, first, second, pieces, sums, beta1, rest1, beta2, rest2, inverse2, eps, columns: tl.constexpr
):
    """Update the moments of one block, and sum the squares of its normalised gradients. Grid (blocks,).

    `rest1`, `rest2`: 1 - beta. `inverse2`: factor that corrects v for bias.
    """
    block = tl.program_id(0).to(tl.int64)
    at = tl.load(pieces + 4 * block) + tl.arange(0, columns)
    here = at < tl.load(pieces + 4 * block + 1)
    g = tl.load(gradient + at, mask=here, other=0.0)
    m = tl.fma(g, rest1, tl.load(first + at, mask=here, other=0.0) * beta1)
    v = tl.fma(g * g, rest2, tl.load(second + at, mask=here, other=0.0) * beta2)
    tl.store(first + at, m, mask=here)
    tl.store(second + at, v, mask=here)
    surprise = tl.div_rn(g, tl.maximum(tl.sqrt_rn(v * inverse2), eps)).to(tl.float64)
    tl.store(sums + block, tl.sum(surprise * surprise, 0))


@triton.jit
def squares_kernel(sums, ranges, squares, columns: tl.constexpr):
    """Add up the blocks' sums of one range, and write the result to its parameter. Grid (ranges,)."""
    its = ranges + 3 * tl.program_id(0)
    stop = tl.load(its + 1)
    total = tl.full([columns], 0.0, tl.float64)
    for start in range(tl.load(its), stop, columns):
        at = start + tl.arange(0, columns)
        total += tl.load(sums + at, mask=at < stop, other=0.0)
    tl.store(squares + tl.load(its + 2), tl.sum(total, 0))


@triton.jit
def weights_kernel(weight, first, second, pieces, squares, rate, decay, inverse1, root2, eps, columns: tl.constexpr):
    """Update the weights of one block. Grid (blocks,).

    `rate`: -lr. `inverse1`, `root2`: factors that correct m and sqrt(v) for bias.
    """
    its = pieces + 4 * tl.program_id(0).to(tl.int64)
    at = tl.load(its) + tl.arange(0, columns)
    here = at < tl.load(its + 1)
    mean = tl.load(squares + tl.load(its + 2)) / tl.load(its + 3).to(tl.float64)
    share = (1.0 / tl.maximum(tl.sqrt(mean), 1.0)).to(tl.float32)
    w = tl.load(weight + at, mask=here, other=0.0)
    root = tl.sqrt_rn(tl.load(second + at, mask=here, other=0.0)) * root2 + eps
    direction = tl.div_rn(tl.load(first + at, mask=here, other=0.0), root) * inverse1
    direction = tl.fma(w, decay, direction) * share
    tl.store(weight + at, tl.fma(direction, rate, w), mask=here)


def update_moments(
    gradient: Tensor, state: State, blocks: Blocks, squares: Float[Tensor, " parameters"], group: Group
) -> None:
    """Update `exp_avg` and `exp_avg_sq`, contiguous fp32 like the gradient, in place. Write each range's sum of squared
    normalised gradients into `squares`, float64. `group` must have `betas`, `eps` and the update's number, `step`.
    """
    (beta1, beta2), sums = group["betas"], squares.new_empty(len(blocks.pieces))
    if len(blocks.ranges):
        moments_kernel[(len(blocks.pieces),)](
            gradient, state["exp_avg"], state["exp_avg_sq"], blocks.pieces, sums, beta1, 1 - beta1, beta2, 1 - beta2,
            1 / (1 - beta2 ** group["step"]), group["eps"], columns=BLOCK_ELEMENTS, **_OPTIONS,
        )  # fmt: skip
        squares_kernel[(len(blocks.ranges),)](
            sums, blocks.ranges, squares, columns=_SUMMED_BLOCKS, enable_fp_fusion=False
        )


def update_weights(
    weight: Tensor, state: State, blocks: Blocks, squares: Float[Tensor, " parameters"], group: Group
) -> None:
    """Update contiguous fp32 weights in place. `squares`: the sums of `update_moments` over whole parameters."""
    bias1, bias2 = (1 - beta ** group["step"] for beta in group["betas"])
    if len(blocks.ranges):
        weights_kernel[(len(blocks.pieces),)](
            weight, state["exp_avg"], state["exp_avg_sq"], blocks.pieces, squares, -group["lr"],
            group["weight_decay"], 1 / bias1, bias2**-0.5, group["eps"], columns=BLOCK_ELEMENTS, **_OPTIONS,
        )  # fmt: skip
