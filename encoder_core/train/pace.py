"""How busy a rank was in a step. It is apart from the clocks, so that what judges stragglers does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The speed of one rank in a step.

    Attributes:
        data: seconds from the start of the step until its data had arrived.
        forward: seconds in forward passes; 0 at ZeRO stage 3.
        tokens: number of tokens in these passes.
    """

    data: float
    forward: float
    tokens: int
