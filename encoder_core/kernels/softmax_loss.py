"""Softmax cross-entropy: one kernel computes the loss from logits, one overwrites the logits with their gradient.

    loss = log sum_v exp(logit_v) - logit_target,    gradient = softmax(logits) - onehot(target)

A program of the first kernel reads one target's logits once. Each of its lanes tracks the largest logit so far, its
column, and a sum of exponentials relative to it (Milakov and Gimelshein, 2018); lanes are merged at the end. A
program of the second kernel has some columns of some targets. Before rounding it sums the gradients of its columns, as
its part of the bias's gradient; torch adds the parts. The split into programs depends only on the number of targets,
so the result has the same bits every time.

The loss is NaN if logits are not finite, or the id is outside the vocabulary. The first of several equal logits is
the prediction.

Shapes: C targets, V vocabulary. Sums are in fp32 (fp64 for fp64 logits).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from encoder_core.kernels.operands import FUSED_MULTIPLY_ADDS

_COLUMNS = 2048  # columns of a tile; constant, so that the kernel trial compiles all that training needs
_OPTIONS = {"num_warps": 8, **FUSED_MULTIPLY_ADDS}  # launch options of both kernels
_TARGETS_PER_PROGRAM = 64  # number of targets of one program of the gradient kernel
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest fp32 number, not -inf, because -inf minus -inf is NaN
_NO_INDEX = tl.constexpr(2**31 - 1)  # larger than any column's index


class SoftmaxSums(NamedTuple):
    """The results of `sums_kernel` for each target.

    Attributes:
        losses: cross-entropy.
        correct: whether the target has the largest logit.
        largest: the largest logit.
        log_sums: logarithm of the sum of exponentials relative to the largest logit.
    """

    losses: Float[Tensor, " targets"]
    correct: Bool[Tensor, " targets"]
    largest: Float[Tensor, " targets"]
    log_sums: Float[Tensor, " targets"]


# Not specialised on arguments that vary by chunk, so that the kernel trial before training compiles all that it needs.
@triton.jit(do_not_specialize_on_alignment=["ids"])
def sums_kernel(logits, ids, losses, correct, largest, log_sums, vocab, columns: tl.constexpr, sums: tl.constexpr):
    """Compute the fields of `SoftmaxSums` for one target. Grid (C,)."""
    target = tl.program_id(0).to(tl.int64)
    row = logits + target * vocab
    most = tl.full([columns], _LOWEST, sums)
    total = tl.full([columns], 0.0, sums)
    where = tl.full([columns], _NO_INDEX, tl.int32)
    for first in range(0, vocab, columns):
        column = first + tl.arange(0, columns)
        x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(sums)
        ahead = x - most
        less = tl.exp(-tl.abs(ahead))  # exponential of the smaller of `x` and `most`; the larger one's is 1
        total = tl.where(ahead > 0.0, total * less + 1.0, total + less)
        where = tl.where(ahead > 0.0, column, where)
        most = tl.maximum(most, x)
    whole = tl.max(most, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(most - whole), 0))
    best = tl.min(tl.where(most == whole, where, _NO_INDEX), 0)
    own = tl.load(ids + target)
    its = tl.load(row + own, mask=(own >= 0) & (own < vocab), other=float("nan")).to(sums)
    tl.store(losses + target, log_sum - (its - whole))
    tl.store(correct + target, best == own)
    tl.store(largest + target, whole)
    tl.store(log_sums + target, log_sum)


@triton.jit(do_not_specialize=["targets"], do_not_specialize_on_alignment=["ids"])
def gradient_kernel(
    logits, ids, largest, log_sums, by_bias, targets, vocab,
    each: tl.constexpr, columns: tl.constexpr, sums: tl.constexpr,
):  # fmt: skip
    """Overwrite a tile of columns of `each` targets' logits with the gradient, and store its sums in `by_bias`.
    Grid (tiles of columns, parts of targets)."""
    part = tl.program_id(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    here = column < vocab
    summed = tl.full([columns], 0.0, sums)
    for target in range(part * each, tl.minimum(part * each + each, targets)):
        at = logits + tl.cast(target, tl.int64) * vocab + column
        x = tl.load(at, mask=here, other=float("-inf")).to(sums)
        d = tl.exp(x - tl.load(largest + target) - tl.load(log_sums + target))
        d = tl.where(column == tl.load(ids + target), d - 1.0, d)
        summed += d
        tl.store(at, d.to(logits.dtype.element_ty), mask=here)
    if by_bias is not None:
        tl.store(by_bias + part.to(tl.int64) * vocab + column, summed, mask=here)


def softmax_sums(logits: Float[Tensor, "targets vocab"], ids: Int[Tensor, " targets"]) -> SoftmaxSums:
    """Compute each target's loss and sums, reading the logits once. The logits must be contiguous."""
    targets, vocab = logits.shape
    wide = _sum_dtype(logits.dtype)
    losses, largest, log_sums = (logits.new_empty(targets, dtype=wide) for _ in range(3))
    correct = torch.empty_like(ids, dtype=torch.bool)
    if targets:
        sums_kernel[(targets,)](
            logits, ids, losses, correct, largest, log_sums, vocab,
            columns=_COLUMNS, sums=_triton_sum_dtype(wide), **_OPTIONS,
        )  # fmt: skip
    return SoftmaxSums(losses, correct, largest, log_sums)


def overwrite_with_gradient(
    logits: Float[Tensor, "targets vocab"],
    ids: Int[Tensor, " targets"],
    sums: SoftmaxSums,
    *,
    biased: bool,
) -> Float[Tensor, " vocab"] | None:
    """Overwrite the logits with their gradient of the summed losses. If `biased`, return the decoder bias's gradient,
    in fp32 or wider."""
    targets, vocab = logits.shape
    parts = -(-targets // _TARGETS_PER_PROGRAM)
    by_bias = logits.new_empty(parts, vocab, dtype=sums.losses.dtype) if biased else None
    if targets:
        gradient_kernel[(-(-vocab // _COLUMNS), parts)](
            logits, ids, sums.largest, sums.log_sums, by_bias, targets, vocab,
            each=_TARGETS_PER_PROGRAM, columns=_COLUMNS, sums=_triton_sum_dtype(sums.losses.dtype), **_OPTIONS,
        )  # fmt: skip
    return None if by_bias is None else by_bias.sum(0)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _triton_sum_dtype(wide: torch.dtype) -> tl.dtype:
    return tl.float64 if wide == torch.float64 else tl.float32
