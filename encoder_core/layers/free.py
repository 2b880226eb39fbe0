"""Parameters that belong to no matrix product of torch's, as modules, so that tables can tell weights from biases."""

import torch
from torch import nn


class Weights(nn.Module):
    """A weight of any shape, in the layout of the published model; unset until initialised or loaded."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Bias(nn.Module):
    """A bias of any shape, at first zero."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))
