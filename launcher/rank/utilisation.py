"""Model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B): the FLOPs that a step needs, divided by what the
devices could compute in its time. Recomputation does not count.

FLOPs are counted by `encoder_core.cost.flops`, for full rows. A GPU's peak is its vendor's figure; a CPU's is measured.
"""

import time
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch

from encoder_core.cost.products import Shape
from launcher.estimate.cluster import gpu_of_device
from launcher.estimate.workload import microbatch_flops, targets_per_row
from launcher.recipe.schema import Recipe

_MEASURE_S = 0.1
_SIZE = 512  # of the square matrices: large enough for a core's full speed, 10 ms of work
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Utilisation:
    """Of a run on these devices.

    Attributes:
        ends: of each phase, the first step after it.
        flops: of each phase, those of a token, forward and backward.
        peak: FLOP/s of all ranks' devices together.
    """

    ends: tuple[int, ...]
    flops: tuple[float, ...]
    peak: float

    def of(self, step: int, tokens: int, seconds: float) -> float:
        """A share: of the step after `step` steps, which took `tokens` and `seconds`."""
        phase = min(bisect_right(self.ends, step), len(self.ends) - 1)
        return tokens * self.flops[phase] / (max(seconds, 1e-9) * self.peak)


def utilisation(recipe: Recipe, vocabulary: int, device: torch.device, ranks: int) -> Utilisation | None:
    """None if the device's peak is not known. Takes a tenth of a second on a CPU.

    `device`: this rank's; the others are assumed to be like it. `vocabulary`: the tokenizer's size, for a model that
    does not state its own.
    """
    speed = peak(device, recipe.precision)
    if speed is None:
        return None
    model = recipe.model if recipe.model.vocab else recipe.model.model_copy(update={"vocab": vocabulary})
    known = recipe.model_copy(update={"model": model})
    shapes = (Shape(1, phase.length, targets_per_row(recipe, phase.length)) for phase in recipe.phases)
    flops = tuple(microbatch_flops(known, shape).model / shape.tokens for shape in shapes)
    return Utilisation(tuple(accumulate(phase.steps for phase in recipe.phases)), flops, speed * ranks)


def peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of dense products in this precision: the vendor's; of a CPU, measured with this process's threads.

    None for a GPU whose figures are not known.
    """
    if device.type != "cuda":
        return _measured(_DTYPES[precision])
    found = torch.cuda.get_device_properties(device)
    gpu = gpu_of_device(found.name, found.total_memory)
    if gpu is None:
        return None
    return gpu.peak if precision == "bf16" else gpu.peak_fp32


def _measured(dtype: torch.dtype) -> float:
    """The fastest of some products of two matrices, with this process's threads."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    torch.mm(matrix, matrix)  # the first one sets up
    best, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / best
