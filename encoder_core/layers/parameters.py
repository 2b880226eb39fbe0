"""Parameters in published layouts for which torch has no module, and joint products of Linears with the same inputs.

Each parameter is used only in the `forward` of the module that owns it, because ZeRO 3 gathers it there, in the
forward pass and again in the backward pass.

Linears with the same inputs keep separate parameters. On a GPU their backward pass is joint: the products accumulate
the gradient of the inputs in place, where separate Linears would add three tensors. Forward passes are separate
products, which include the biases. One joint product would have to copy the biases to every row first: 0.2 ms of the
8.7 ms that a layer of BERT-large took for 32,768 tokens on an H200. Attention kernels need the contiguous outputs.

Shapes: T tokens, H hidden, N heads, D head width; I inputs, O outputs, L Linears.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from encoder_core.layers.sizes import GPU_DEVICE_TYPES


class ScaledLinear(nn.Linear):
    """A Linear whose weight is initialised with `scale` times the model's standard deviation (`initialise.py`).

    Megatron uses the scale 1 / sqrt(2 * layers) for projections that write to the residual stream (Shoeybi et al.,
    2019, section 4.2), so that the stream's variance does not grow with depth.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, *, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias)
        self.scale = scale


@dataclass(frozen=True)
class JoinedLayout:
    """How several matrices are interleaved in one matrix of shape [times * sum(rows), columns].

    The matrix has `times` blocks; in each, matrix i has rows[i] rows. So matrix i is [times * rows[i], columns].
    """

    rows: tuple[int, ...]
    times: int = 1

    def views(self, whole: Float[Tensor, "all columns"]) -> Sequence[Float[Tensor, "times rows columns"]]:
        """Return a view [times, rows[i], columns] of each matrix i."""
        return torch.split(whole.view(self.times, sum(self.rows), -1), list(self.rows), 1)


class JoinedLinear(nn.Linear):
    """Several Linears with the same inputs whose weights are one parameter, as the family published them; one product
    computes all.

    `outputs`: number of output rows of each Linear in a block, and `times`: number of blocks (DeBERTa: one per head).
    `joined` is this layout, by which Muon separates the matrices.
    """

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool = True, *, times: int = 1) -> None:
        super().__init__(inputs, times * sum(outputs), bias)
        self.joined = JoinedLayout(tuple(outputs), times)


class Weights(nn.Module):
    """A module with one weight of any shape, uninitialised at first. Its forward returns the weight."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight.clone()  # a new tensor, to which ZeRO's backward hooks can attach


class Bias(nn.Module):
    """A module with one bias of any shape, initially zero. Its forward adds the bias to the input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return x + self.bias


class AttentionBias(Bias):
    """XLNet's bias of the queries for one score term (r_w, r_r, r_s). Its initialisation is a weight's, not zero."""


class IntoHeads(nn.Module):
    """A projection from states to heads, with a weight [H, N, D] and no bias."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, heads, hidden // heads))

    def forward(self, x: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens heads width"]:
        y: Tensor = torch.tensordot(x, self.weight, dims=1)
        return y


class OutOfHeads(nn.Module):
    """A projection from heads back to states, also with a weight [H, N, D] and no bias."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, heads, hidden // heads))

    def forward(self, x: Float[Tensor, "tokens heads width"]) -> Float[Tensor, "tokens hidden"]:
        y: Tensor = torch.tensordot(x, self.weight, dims=([-2, -1], [1, 2]))
        return y


def project(
    x_TI: Float[Tensor, "tokens inputs"], linears: Sequence[nn.Linear]
) -> tuple[Float[Tensor, "tokens _"], ...]:
    """Return the output of each of `linears` for `x_TI`. On a GPU, the backward pass is joint (`project_jointly`).

    At ZeRO 3 Linears are called separately, because a weight is gathered only during its own module's passes. In
    compiled code they are called separately too, because the compiler arranges the products itself.
    """
    whole = not hasattr(linears[0].weight, "ds_id")
    if x_TI.device.type in GPU_DEVICE_TYPES and whole and not torch.compiler.is_compiling():
        return project_jointly(x_TI, linears)
    return tuple(linear(x_TI) for linear in linears)


def project_jointly(
    x_TI: Float[Tensor, "tokens inputs"], linears: Sequence[nn.Linear]
) -> tuple[Float[Tensor, "tokens outputs"], ...]:
    """Do what `project` does on a GPU, on any device. Weights are [O, I]; all of `linears` have biases, or none."""
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    parts: tuple[Tensor, ...] = _ProjectJointly.apply(x_TI, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return parts


class _ProjectJointly(torch.autograd.Function):
    """The autograd function of `project_jointly`."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x_TI, *weights)
        each = zip_longest(weights, biases)
        return tuple(F.linear(x_TI, weight_OI, bias_O) for weight_OI, bias_O in each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *weights = ctx.saved_tensors
        of_x, _, *wanted = ctx.needs_input_grad
        dx_TI = gradients[0] @ weights[0] if of_x else None
        if dx_TI is not None:
            for dy_TO, weight_OI in zip(gradients[1:], weights[1:], strict=True):
                dx_TI.addmm_(dy_TO, weight_OI)
        of_weights, of_biases = wanted[: len(weights)], wanted[len(weights) :]
        dweights = [dy_TO.t() @ x_TI if of else None for dy_TO, of in zip(gradients, of_weights, strict=True)]
        dbiases = [dy_TO.sum(0) if of else None for dy_TO, of in zip(gradients, of_biases, strict=False)]
        return (dx_TI, None, *dweights, *dbiases)
