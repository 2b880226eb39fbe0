"""Several Linears of the same inputs, computed by one product, though each keeps its own parameters.

Meant for GPUs, which large products and few kernels suit: the inputs are read once, and their derivative is summed
inside its products, where three Linears would add three tensors. What comes out are tensors without gaps, as attention
kernels want them. No joined weight is kept for the backward pass. It has not met a GPU. On a CPU it is no quicker.

Shapes: T tokens, I inputs, O outputs, L Linears.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def project(
    x_TI: Float[Tensor, "tokens inputs"], linears: Sequence[nn.Linear]
) -> tuple[Float[Tensor, "tokens _"], ...]:
    """What each of `linears` makes of `x_TI`: by one product on a GPU if their weights are alike in shape.

    At ZeRO 3 each is called by itself: there a weight has its numbers only in its own module's passes. So it is in what
    torch compiles, which orders products by itself.
    """
    first = linears[0].weight
    alike = all(linear.weight.shape == first.shape for linear in linears)
    if (
        x_TI.device.type == "cuda"
        and alike
        and not hasattr(first, "ds_id")
        and not torch.compiler.is_compiling()
    ):
        return joint(x_TI, linears)
    return tuple(linear(x_TI) for linear in linears)


def joint(
    x_TI: Float[Tensor, "tokens inputs"], linears: Sequence[nn.Linear]
) -> tuple[Float[Tensor, "tokens outputs"], ...]:
    """As `project`, by one product on any device. Weights are [O, I]; all of `linears` have biases, or none has."""
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    parts: tuple[Tensor, ...] = _Joint.apply(x_TI, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return parts


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x_TI, *weights)
        x_LTI, weights_LIO = x_TI.expand(count, -1, -1), torch.stack(weights).transpose(1, 2)
        if not biases:
            return torch.bmm(x_LTI, weights_LIO).unbind()
        return torch.baddbmm(torch.stack(biases)[:, None], x_LTI, weights_LIO).unbind()

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
