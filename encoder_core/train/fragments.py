"""A fragment: the part of one tensor of the training state that one rank holds, whatever the ZeRO stage."""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + length) of the flattened parameter (or memory) `name`.

    Over all ranks the fragments of a name are disjoint and cover it.

    Attributes:
        name: the parameter's name, as `named_parameters` gives it.
        start: index of the first element in the flattened parameter.
        tensors: 1-D float32 tensors of equal length, one for each kind of state: "master" (the weight the
            optimizer updates), "exp_avg", "exp_avg_sq"; of a memory "memory" alone. May share storage with the trainer.
    """

    name: str
    start: int
    tensors: dict[str, Float32[Tensor, " length"]]
