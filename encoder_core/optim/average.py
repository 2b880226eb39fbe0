"""An exponential moving average of the weights (averaging: Polyak & Juditsky 1992).

After each update that was applied: average = d average + (1 - d) weight. d is the decay as float32, and both products
and the sum are rounded to float32, one after the other. An element's average depends only on that element's weights,
so it has the same bits however weights are sharded. A fused operation (`lerp`, `add` with a factor) would round
differently at the ends of a tensor, and each ZeRO stage cuts tensors at other elements.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

AVERAGE = "average"
"""Name of the average in the optimizer's state of a tensor. Checkpoints store it under this name."""
_PIECE_ELEMENTS = 1 << 22  # elements of a temporary tensor: 16 MiB, yet few kernel launches for a large model


class WeightAverage:
    """The average of the fp32 weights that a rank holds. It is stored in the optimizer's state, like the moments.

    Args:
        decay: weight d of the old average, between 0 and 1.
        weights: weight tensors (ZeRO's flat partitions, if sharded), by the update group that changes them.
        state: the optimizer's state, by tensor.
    """

    def __init__(
        self,
        decay: float,
        weights: Mapping[str, Sequence[Tensor]],
        state: MutableMapping[Tensor, dict[str, Tensor]],
    ) -> None:
        self._decay = float(torch.tensor(decay, dtype=torch.float32))
        self._weights, self._state = weights, state
        self.reset_to_weights()

    def reset_to_weights(self) -> None:
        """Set the average to the current weights."""
        for weights in self._weights.values():
            for weight in weights:
                self._state[weight][AVERAGE] = weight.detach().clone()

    def update_average(self, update_group: str) -> None:
        """Move the average towards the current weights of `update_group`; call it after each applied update."""
        for weight in self._weights[update_group]:
            for average, new in self._pieces(weight):
                average.mul_(self._decay).add_(new * (1.0 - self._decay))

    def swap_with_weights(self) -> None:
        """Exchange the values of weights and average, bit for bit."""
        for weights in self._weights.values():
            for weight in weights:
                for average, new in self._pieces(weight):
                    kept = new.clone()
                    new.copy_(average)
                    average.copy_(kept)

    def _pieces(self, weight: Tensor) -> Sequence[tuple[Float32[Tensor, " elements"], Float32[Tensor, " elements"]]]:
        """Return pairs of views, of the average and of `weight`, with at most `_PIECE_ELEMENTS` elements each."""
        both = (self._state[weight][AVERAGE], weight.detach())
        average, new = (torch.split(tensor.view(-1), _PIECE_ELEMENTS) for tensor in both)
        return list(zip(average, new, strict=True))
