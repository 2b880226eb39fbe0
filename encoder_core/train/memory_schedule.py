"""When a model's memory is recomputed, and what it is called. Apart from the memory, so that reading a recipe does not
load DeepSpeed, nor listing checkpoints torch."""

from dataclasses import dataclass

MEMORY = "memory"
"""The kind of state that memory is in a checkpoint, beside those that parameters have."""


@dataclass(frozen=True)
class Refresh:
    """When memory is recomputed, and from how much: a function of the step, the same in every run of a recipe.

    Attributes:
        every: at each multiple of so many steps; and where a phase begins, from nothing.
        steps: from so many steps before, as far as the phase has them.
    """

    every: int
    steps: int

    def before(self, step: int, phase_start: int) -> range | None:
        """The steps from which memory is recomputed for `step`; None where it is carried on."""
        if step % self.every and step != phase_start:
            return None
        return range(max(phase_start, step - self.steps), step)
