"""How much each step of a phase takes, as a pure function of the step: the same batch every step, or one that rises."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Rise:
    """A batch that begins at `start` and grows, evenly but in multiples of `granule`, for `steps` steps."""

    start: int
    steps: int
    granule: int


@dataclass(frozen=True)
class StepBatches:
    """The batch of each step of a phase, in samples or in tokens.

    Attributes:
        batch: of every step; of those after the rise, if there is one.
        rise: None if the batch is the same from the first step.
    """

    batch: int
    rise: Rise | None = None

    def at(self, step: int) -> int:
        """The batch of a step, counted from 0 where the phase begins."""
        return self._levels[self._level(step)][1]

    def before(self, step: int) -> int:
        """What the first `step` steps take together."""
        level = self._level(step)
        first, batch = self._levels[level]
        return self._before[level] + (step - first) * batch

    def _level(self, step: int) -> int:
        return bisect_right(self._levels, step, key=lambda level: level[0]) - 1

    @cached_property
    def _levels(self) -> tuple[tuple[int, int], ...]:
        """(first step, batch) of each size that the batch has, in order."""
        if self.rise is None:
            return ((0, self.batch),)
        rise, height = self.rise, self.batch - self.rise.start
        levels = {
            -(-up * rise.steps // height): rise.start + up for up in range(0, height, rise.granule)
        }  # a rise of more than a granule a step skips sizes
        return (*levels.items(), (rise.steps, self.batch))

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """What all steps before each level take."""
        edges = [first for first, _ in self._levels]
        taken = (
            (stop - first) * batch for (first, batch), stop in zip(self._levels, edges[1:], strict=False)
        )
        return (0, *accumulate(taken))
