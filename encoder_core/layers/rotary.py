"""Rotary positions (Su et al., 2021, RoFormer): queries and keys are turned by angles that grow with their position.

Number i of the first half of a head and number i of its second half are one pair, turned by position * base^(-2 i / D):
the product of a turned query and key depends on their distance only. Angles are computed in fp32 whatever the model's
precision, as in the published models: at position 8,191 an angle in fp32 is off by up to 2.4e-4, and weights were
trained with that.

Shapes: T tokens, N heads, D head width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rotation(NamedTuple):
    """Of each token's angles, in fp32, shaped to broadcast over heads."""

    cos: Float[Tensor, "tokens 1 half_width"]
    sin: Float[Tensor, "tokens 1 half_width"]


def rotation(positions_T: Int[Tensor, " tokens"], base: float, width: int) -> Rotation:
    """For heads of an even `width`."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device) / width
    angles_T1D = positions_T[:, None, None].float() * (1.0 / base**exponent)
    return Rotation(angles_T1D.cos(), angles_T1D.sin())


def rotate(x_TND: Float[Tensor, "tokens heads width"], by: Rotation) -> Float[Tensor, "tokens heads width"]:
    """Each pair turned by its angle, computed in fp32 or wider, in the dtype of `x_TND`."""
    first, second = x_TND.chunk(2, -1)
    turned = torch.cat((first * by.cos - second * by.sin, second * by.cos + first * by.sin), -1)
    return turned.to(x_TND.dtype)
