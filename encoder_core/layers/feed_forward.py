"""The position-wise feed-forward block and its activation. Shapes: T tokens, H hidden, F inner width."""

from typing import Literal, assert_never

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh"]
"""GELU by the error function, or by the tanh approximation that the official BERT uses."""


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "..."]:
    match activation:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case _:
            assert_never(activation)


class FeedForward(nn.Module):
    """Linear, activation, Linear ("Attention Is All You Need", section 3.3)."""

    def __init__(self, hidden: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        y_TH: Tensor = self.down(activate(self.up(x_TH), self.activation))
        return y_TH
