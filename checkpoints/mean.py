"""The mean of the weights in several checkpoints of one model (Izmailov et al. 2018), read range by range."""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from checkpoints.layout import element_count
from checkpoints.load import Reader
from encoder_core.train.zero_state import MASTER

_RANGE_ELEMENTS = 1 << 20  # elements of a range that is read at a time


class MeanReader:
    """A reader of the arithmetic mean of master weights, all checkpoints weighing the same.

    Each element is summed in float64, in the order of `readers`, divided by their number and rounded to float32. Beside
    the mean of the parameter that is read, memory holds one range, and what each reader keeps.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    def read_full(self, name: str) -> Float32[Tensor, "..."]:
        """Return the mean of a whole parameter in its own shape, on the CPU. Raises as `Reader.read`."""
        shape = self._readers[0].manifest.shapes[name]
        mean = torch.empty(element_count(shape), dtype=torch.float32)
        for start in range(0, len(mean), _RANGE_ELEMENTS):
            part = mean[start : start + _RANGE_ELEMENTS]
            total = torch.zeros(len(part), dtype=torch.float64)
            for reader in self._readers:
                total += reader.read(name, MASTER, start, start + len(part))
            part.copy_(total / len(self._readers))
        return mean.view(shape)
