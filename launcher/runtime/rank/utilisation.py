"""Model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B): the FLOPs that a step needs, divided by what the
devices could compute in its time. Recomputation does not count.

FLOPs are counted by `encoder_core.cost.flops`, for full rows. A GPU's peak is its vendor's figure. CPUs have no MFU:
what one does a second depends on its neighbours, so a peak that was measured may be exceeded many times over.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch

from launcher.runtime.capacity.cluster import gpu_of_device
from launcher.runtime.capacity.workload import full_rows, microbatch_flops, phase_targets
from launcher.runtime.recipe.schema import Recipe


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
    """None if the device's peak is not known.

    `device`: this rank's; the others are assumed to be like it. `vocabulary`: the tokenizer's size, for a model that
    does not state its own.
    """
    speed = peak(device, recipe.precision)
    if speed is None:
        return None
    model = recipe.model if recipe.model.vocab else recipe.model.model_copy(update={"vocab": vocabulary})
    known = recipe.model_copy(update={"model": model})
    shapes = (full_rows(recipe, 1, phase.length, phase_targets(recipe, phase)) for phase in recipe.phases)
    flops = tuple(microbatch_flops(known, shape).model / shape.tokens for shape in shapes)
    return Utilisation(tuple(accumulate(phase.steps for phase in recipe.phases)), flops, speed * ranks)


def peak(device: torch.device, precision: str) -> float | None:
    """The vendor's FLOP/s of dense products in this precision; None for a CPU, or a GPU that is not known."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    gpu = gpu_of_device(found.name, found.total_memory)
    if gpu is None:
        return None
    return gpu.peak if precision == "bf16" else gpu.peak_fp32
