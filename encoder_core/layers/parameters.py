"""Parameters in the layouts of published models that torch has no module for.

Each is used in the `forward` of the module that owns it, tensors in and tensors out: that is where ZeRO 3 gathers it,
in the forward pass and again in the backward pass.

Shapes: H hidden, N heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScaledLinear(nn.Linear):
    """A Linear whose fresh weight is drawn with `scale` times the model's standard deviation (`initialise.py`).

    Megatron draws the projections that write to the residual stream 1 / sqrt(2 * layers) times as wide (Shoeybi et al.,
    2019, section 4.2), so that the stream's spread does not grow with depth.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, *, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs, bias)
        self.scale = scale


@dataclass(frozen=True)
class Joined:
    """How several matrices lie in one of [times * sum(rows), columns]: `rows` rows of each in turn, `times` over.

    `split` and `join` are each other's inverse. A matrix of `rows` r is then [times * r, columns].
    """

    rows: tuple[int, ...]
    times: int = 1

    def split(self, whole: Float[Tensor, "all columns"]) -> list[Tensor]:
        blocks = whole.view(self.times, sum(self.rows), -1)
        return [part.flatten(0, 1) for part in torch.split(blocks, list(self.rows), 1)]

    def join(self, parts: Sequence[Tensor]) -> Float[Tensor, "all columns"]:
        blocks = [part.view(self.times, len(part) // self.times, -1) for part in parts]
        return torch.cat(blocks, 1).flatten(0, 1)


class JoinedLinear(nn.Linear):
    """Several Linears of the same inputs whose weights are one parameter, as the family published it: one product
    computes all. An optimizer that treats matrices as wholes (Muon) takes them apart again, as `joined` says.

    `outputs` are those of each; they follow each other `times` over (DeBERTa's, head by head).
    """

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool = True, *, times: int = 1) -> None:
        super().__init__(inputs, times * sum(outputs), bias)
        self.joined = Joined(tuple(outputs), times)


class Weights(nn.Module):
    """A weight of any shape, unset until initialised or loaded. Called, it gives itself."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight.clone()  # a tensor of its own, which carries the backward hooks


class Bias(nn.Module):
    """A bias of any shape, at first zero, added to what it is called with."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return x + self.bias


class AttentionBias(Bias):
    """XLNet's bias on the queries of a kind of score (r_w, r_r, r_s): drawn and decayed as a weight is."""


class IntoHeads(nn.Module):
    """A projection [H, N, D] from states to heads, without a bias."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, heads, hidden // heads))

    def forward(self, x: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens heads width"]:
        y: Tensor = torch.tensordot(x, self.weight, dims=1)
        return y


class OutOfHeads(nn.Module):
    """A projection, stored [H, N, D] too, from heads back to states, without a bias."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, heads, hidden // heads))

    def forward(self, x: Float[Tensor, "tokens heads width"]) -> Float[Tensor, "tokens hidden"]:
        y: Tensor = torch.tensordot(x, self.weight, dims=([-2, -1], [1, 2]))
        return y
