"""When a model's memory is recomputed, and its name in checkpoints.

A module of its own, so that reading a recipe does not import DeepSpeed, and listing checkpoints does not import torch.
"""

from dataclasses import dataclass

MEMORY = "memory"
"""The kind of state that memory is in a checkpoint, beside those that parameters have."""


@dataclass(frozen=True)
class Refresh:
    """When memory is recomputed, and from how much: a function of the step, the same in every run of a recipe.

    Attributes:
        every: memory is recomputed at each multiple of so many steps. Where a phase begins, it is empty.
        steps: how many steps before it is recomputed from, as far as the phase has them.
    """

    every: int
    steps: int

    def before(self, step: int, phase_start: int) -> range | None:
        """The steps from which memory is recomputed for `step`; None where it is carried on."""
        if step % self.every and step != phase_start:
            return None
        return range(max(phase_start, step - self.steps), step)
