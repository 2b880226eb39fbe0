"""What a run does at which step, as pure functions of the step: phases, learning rate."""

from bisect import bisect_right
from itertools import accumulate

from encoder_core.optim import schedules
from launcher.recipe.schema import Recipe


def phase_at(recipe: Recipe, step: int) -> tuple[int, int]:
    """The phase of a step, and the first step of that phase; after the last step, the last phase."""
    starts = [0, *accumulate(phase.steps for phase in recipe.phases[:-1])]
    number = bisect_right(starts, step) - 1
    return number, starts[number]


def learning_rate(recipe: Recipe, peak: float, step: int) -> float:
    """The rate of a step, counted from 0. `peak`: the optimizer's; phases may have their own.

    A schedule of a phase counts its steps from 0. The run's schedule counts those of all phases, also of phases that
    have their own.
    """
    number, start = phase_at(recipe, step)
    phase = recipe.phases[number]
    highest = peak if phase.lr is None else phase.lr
    if phase.schedule is None:
        return schedules.learning_rate(recipe.schedule, peak=highest, total=recipe.total_steps, step=step)
    return schedules.learning_rate(phase.schedule, peak=highest, total=phase.steps, step=step - start)
