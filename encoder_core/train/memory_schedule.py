"""When a model's memory is recomputed, and its name in checkpoints.

It is a separate file, so that reading a recipe does not import DeepSpeed, and listing checkpoints does not import
torch.
"""

from dataclasses import dataclass

MEMORY = "memory"
"""Kind of state of memory in a checkpoint, in addition to the kinds of parameters."""


@dataclass(frozen=True)
class Refresh:
    """When memory is recomputed, and from how many steps: a function of the step, the same in every run of a recipe.

    Attributes:
        every: number of steps; memory is recomputed at each multiple of it. It is empty where a phase begins.
        steps: number of preceding steps from which it is recomputed, as far as the phase has them.
    """

    every: int
    steps: int

    def before(self, step: int, phase_start: int) -> range | None:
        """Return the steps from which memory is recomputed for `step`; None if memory is kept."""
        if step % self.every and step != phase_start:
            return None
        return range(max(phase_start, step - self.steps), step)
