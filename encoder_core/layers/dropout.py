"""Dropout whose mask is hashed from tokens or table rows (`random_draws.py`): the same in any batch, on any device.

On a CPU torch draws one Bernoulli number for each element, which costs more than all other work on hidden states: 6.3
ns an element on one thread of an AMD EPYC, against 2 ns here, forward pass included. The rate here is rounded to a
multiple of 1/65,536, and kept elements are scaled by exactly that rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from encoder_core.random_draws import DRAW_VALUES, draw_key, uniform_int16


class Dropout(nn.Module):
    """A module that applies `dropout` in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(
        self, x: Float[Tensor, "*places width"], keys: Int[Tensor, "*places"]
    ) -> Float[Tensor, "*places width"]:
        return dropout(x, self.rate, keys) if self.training else x

    def next_draw(self) -> Int[Tensor, ""] | None:
        """Make the next draw, for `apply_draw`; None in evaluation or at rate 0, when nothing is dropped."""
        return draw_key() if self.training and drop_threshold(self.rate) else None

    def apply_draw(
        self,
        draw: Int[Tensor, ""] | None,
        x: Float[Tensor, "*places width"],
        keys: Int[Tensor, "*places"],
    ) -> Float[Tensor, "*places width"]:
        """Apply dropout with a draw from `next_draw`, because compiled code cannot make draws."""
        return x if draw is None else dropout(x, self.rate, keys, draw)


def dropout(
    x: Float[Tensor, "*places width"],
    rate: float,
    keys: Int[Tensor, "*places"],
    draw: Int[Tensor, ""] | None = None,
) -> Float[Tensor, "*places width"]:
    """Set each element to zero with probability `rate`, and divide the others by 1 - `rate`.

    `keys`: key of each token or table row (`random_draws.py`). `draw` None: make the next draw.
    """
    threshold = drop_threshold(rate)
    if not threshold:
        return x
    draw = draw_key() if draw is None else draw
    if torch.compiler.is_compiling():  # the compiler fuses and differentiates plain operations
        keep = uniform_int16(keys, draw, range(x.shape[-1])) >= threshold - DRAW_VALUES // 2
        return torch.where(keep, x * kept_scale(threshold), 0.0)
    return _apply(x, keys, threshold, draw)


class _Dropout(torch.autograd.Function):
    """The autograd function of `dropout`, which saves the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, threshold: int, draw: Tensor) -> Tensor:
        keep = keep_mask(keys, draw, range(x.shape[-1]), threshold)
        ctx.save_for_backward(keep)
        ctx.threshold = threshold
        return keep.to(x.dtype).mul_(kept_scale(threshold)).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (keep,) = ctx.saved_tensors
        return keep.to(grad.dtype).mul_(kept_scale(ctx.threshold)).mul_(grad), None, None, None


_apply: Callable[[Tensor, Tensor, int, Tensor], Tensor] = _Dropout.apply


def drop_threshold(rate: float) -> int:
    """Return the number of values, of a 16-bit draw's 65,536, that drop an element."""
    return min(round(rate * DRAW_VALUES), DRAW_VALUES - 1)


def kept_scale(threshold: int) -> float:
    """Return the factor for kept elements that leaves the expectation unchanged."""
    return DRAW_VALUES / (DRAW_VALUES - threshold)


def keep_mask(keys: Int[Tensor, "*places"], draw: Int[Tensor, ""], columns: range, threshold: int) -> Tensor:
    """Return [..., columns] int8, 1 (keep) or 0 (drop) for each key and column."""
    # `least` is the smallest draw that keeps. On a CPU, clamping takes a third of the time of a comparison.
    least = threshold - DRAW_VALUES // 2
    return uniform_int16(keys, draw, columns).clamp(least - 1, least).sub_(least - 1).to(torch.int8)
