"""residual + dropout(x), and the norm of this sum, as one forward and one backward kernel.

    sum = residual + x * kept / (1 - rate),    normed = (sum - mean) / deviation * weight + bias

The norm is LayerNorm (Ba et al., 2016), or RMSNorm (Zhang and Sennrich, 2019), which has mean 0 here. The backward pass
hashes the dropout mask again, so the mask is never in memory. The sum and two numbers of each token are saved.

A program of the backward pass sums the gradients of weight and bias over its own tokens, one after the other, and torch
adds the programs' sums. A program's tokens depend only on the number of all tokens, so the result has the same bits
every time.

Shapes: T tokens, H hidden. A row of H numbers is padded to a power of two in registers.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from encoder_core.kernels.operands import FUSED_MULTIPLY_ADDS
from encoder_core.kernels.tile import GOLDEN_RATIO_64, mix_bits

_MAX_PROGRAMS = 1024  # maximum for a backward pass: enough to occupy a GPU, yet few partial sums to add


class NormParameters(NamedTuple):
    """The parameters of a norm. `weight`, `bias` [H]; `centered`: LayerNorm, else RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool


@triton.jit
def kept_scale(threshold, sums: tl.constexpr):
    """Return the factor by which dropout scales kept elements. It is computed here, because Triton would take a float
    argument as fp32, too inexact for fp64 inputs."""
    numbers = tl.full([], 65536.0, sums)
    return numbers / (numbers - threshold)


@triton.jit
def dropout_keep_mask(draws, row, threshold, padded: tl.constexpr):
    """Return [padded] bool, the elements of a token that dropout keeps: `uniform_int16` >= `threshold` - 2**15."""
    drawn = tl.load(draws + row).to(tl.uint64, bitcast=True)
    quad = tl.arange(0, padded // 4).to(tl.uint64)  # one hash serves four columns
    hashed = mix_bits(drawn + quad * GOLDEN_RATIO_64)
    which = tl.arange(0, 4)[None, :]
    low, high = hashed.to(tl.uint32)[:, None], (hashed >> 32).to(tl.uint32)[:, None]
    bits = tl.where(which < 2, low, high) >> (which % 2 * 16).to(tl.uint32)
    bits = tl.reshape(bits.to(tl.uint16), [padded])
    return (bits.to(tl.int32) ^ 0x8000) >= threshold


# Not specialised on arguments that vary by batch, so that the kernel trial before training compiles all that it needs.
@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    x, residual, weight, bias, draws, total, normed, mean, inverse_deviation, threshold,
    eps: tl.constexpr, centered: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, sums: tl.constexpr,
):  # fmt: skip
    """Compute sum and norm of one token, and save the norm's mean and inverse deviation. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    here = column < width
    at = row * width + column
    added = tl.load(x + at, mask=here, other=0.0).to(sums)
    if draws is not None:
        inverse = kept_scale(threshold, sums)
        added = tl.where(dropout_keep_mask(draws, row, threshold, padded), added * inverse, 0.0)
    summed = tl.load(residual + at, mask=here, other=0.0).to(sums) + added
    # The norm is computed from the rounded sum, because the backward pass reads the rounded sum.
    summed = summed.to(total.dtype.element_ty)
    tl.store(total + at, summed, mask=here)
    wide = summed.to(sums)
    if centered:
        middle = tl.sum(wide, 0) / width
        tl.store(mean + row, middle)
        wide = tl.where(here, wide - middle, 0.0)
    one = tl.full([], 1.0, sums)
    scale = one / tl.sqrt(tl.sum(wide * wide, 0) / width + tl.full([], eps, sums))
    tl.store(inverse_deviation + row, scale)
    y = wide * scale * tl.load(weight + column, mask=here, other=0.0).to(sums)
    if bias is not None:
        y += tl.load(bias + column, mask=here, other=0.0).to(sums)
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "each", "threshold"])
def backward_kernel(
    by_total, by_normed, total, weight, draws, mean, inverse_deviation, dresidual, dx, dweight, dbias, rows, each,
    threshold, centered: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, sums: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a program's `each` tokens, and their sums for weight and bias, from the gradients of the
    outputs, `by_total` (None: unused) and `by_normed`. Grid (programs,)."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    here = column < width
    by_weight = tl.full([padded], 0.0, sums)
    by_bias = tl.full([padded], 0.0, sums)
    factor = tl.load(weight + column, mask=here, other=0.0).to(sums)
    for row in range(program * each, tl.minimum(program * each + each, rows)):
        at = row * width + column
        dy = tl.load(by_normed + at, mask=here, other=0.0).to(sums)
        scale = tl.load(inverse_deviation + row)
        unit = tl.load(total + at, mask=here, other=0.0).to(sums)
        if centered:
            unit = tl.where(here, unit - tl.load(mean + row), 0.0)
        unit *= scale
        by_weight += dy * unit
        by_bias += dy
        dy *= factor
        d = dy - unit * (tl.sum(dy * unit, 0) / width)
        if centered:
            d -= tl.sum(dy, 0) / width
        d *= scale
        if by_total is not None:
            d += tl.load(by_total + at, mask=here, other=0.0).to(sums)
        tl.store(dresidual + at, d.to(dresidual.dtype.element_ty), mask=here)
        if draws is not None:
            inverse = kept_scale(threshold, sums)
            d = tl.where(dropout_keep_mask(draws, row, threshold, padded), d * inverse, 0.0)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=here)
    tl.store(dweight + program * width + column, by_weight, mask=here)
    if dbias is not None:
        tl.store(dbias + program * width + column, by_bias, mask=here)


def residual_norm(
    x: Float[Tensor, "tokens hidden"],
    residual: Float[Tensor, "tokens hidden"],
    norm: NormParameters,
    draws: Int[Tensor, " tokens"] | None,
    threshold: int,
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
    """Return residual + dropout(x), and its norm. `draws`: token keys plus the draw's key; None: no dropout."""
    both: tuple[Tensor, Tensor] = _ResidualNorm.apply(x, residual, *norm[:2], draws, threshold, *norm[2:])
    return both


class _ResidualNorm(torch.autograd.Function):
    """The autograd function of `residual_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        draws: Tensor | None,
        threshold: int,
        eps: float,
        centered: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        total, normed, launch_options = torch.empty_like(x), torch.empty_like(x), _launch_options(x)
        scale = x.new_empty(len(x), dtype=_sum_dtype(x.dtype))
        mean = torch.empty_like(scale) if centered else None
        if len(x):
            forward_kernel[(len(x),)](
                x, residual, weight, bias, draws, total, normed, mean, scale, threshold,
                eps=eps, centered=centered, **launch_options,
            )  # fmt: skip
        ctx.save_for_backward(total, weight, draws, mean, scale)
        ctx.set_materialize_grads(False)
        ctx.settings = threshold, centered, launch_options, bias is not None
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_total: Tensor | None, by_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, draws, mean, scale = ctx.saved_tensors
        threshold, centered, launch_options, biased = ctx.settings
        by_normed = torch.zeros_like(total) if by_normed is None else by_normed.contiguous()
        by_total = None if by_total is None else by_total.contiguous()
        rows, width = total.shape
        each = max(1, -(-rows // _MAX_PROGRAMS))
        programs = -(-rows // each)
        dresidual = torch.empty_like(total)
        dx = dresidual if draws is None else torch.empty_like(total)
        dweight = total.new_empty(programs, width, dtype=_sum_dtype(total.dtype))
        dbias = torch.empty_like(dweight) if biased else None
        if rows:
            backward_kernel[(programs,)](
                by_total, by_normed, total, weight, draws, mean, scale, dresidual, dx, dweight, dbias, rows, each,
                threshold, centered=centered, **launch_options,
            )  # fmt: skip
        sums = [None if part is None else part.sum(0).to(weight.dtype) for part in (dweight, dbias)]
        return dx, dresidual, *sums, None, None, None, None


def _launch_options(x: Tensor) -> dict[str, Any]:
    """Return the compile-time arguments and the launch options of both kernels for rows as wide as those of `x`."""
    width = x.shape[-1]
    padded = max(16, 1 << (width - 1).bit_length())
    sums = tl.float64 if x.dtype == torch.float64 else tl.float32
    warps = min(16, max(1, padded // 256))
    return {"width": width, "padded": padded, "sums": sums, "num_warps": warps, **FUSED_MULTIPLY_ADDS}


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
