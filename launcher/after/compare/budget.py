"""Computes the tokens or FLOPs of a recipe's run, and shortens or lengthens a recipe to a budget.

Tokens are counted as if all rows were full, including special ones. FLOPs are the model's, forward and backward, as
`encoder_core.cost.flops` counts them, without those that activation checkpointing repeats.
"""

from encoder_core.optim.schedules import ScheduleConfig
from launcher.after.compare.arguments import Budget, Unit
from launcher.errors import OptionError
from launcher.runtime.capacity.workload import microbatch_flops, microbatch_shape
from launcher.runtime.recipe.load import reload
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.timeline import tokens_before


class Cost:
    """The tokens and FLOPs of the first steps of a run.

    Args:
        vocabulary: number of the tokenizer's ids, for a recipe without a vocabulary size of its own.
    """

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        known = recipe.model.model_copy(update={"vocab": recipe.model.vocab or vocabulary})
        self._recipe = recipe.model_copy(update={"model": known})
        self._each = [self._of_token(phase) for phase in recipe.phases]

    def tokens(self, step: int) -> int:
        """Return the number of tokens of the first `step` steps."""
        return tokens_before(self._recipe, step)

    def flops(self, step: int) -> float:
        """Return the FLOPs of the first `step` steps."""
        total = 0.0
        for phase, each in zip(self._recipe.phases, self._each, strict=True):
            steps = min(phase.steps, step)
            alone = self._recipe.model_copy(update={"phases": (phase,)})
            total, step = total + each * tokens_before(alone, steps), step - steps
        return total

    def of(self, unit: Unit, step: int) -> float:
        """Return the tokens or FLOPs (`unit`) of the first `step` steps."""
        return self.tokens(step) if unit == "tokens" else self.flops(step)

    def last_step(self, unit: Unit) -> float:
        """Return what the run's last step takes."""
        total = self._recipe.total_steps
        return self.of(unit, total) - self.of(unit, total - 1)

    def _of_token(self, phase: RecipePhase) -> float:
        shape = microbatch_shape(self._recipe, phase)
        return microbatch_flops(self._recipe, shape).model / shape.tokens


def within(recipe: Recipe, budget: Budget, vocabulary: int) -> Recipe:
    """Return `recipe` with the number of steps that uses the budget, to the nearest step. Phases and the parts of
    schedules keep their shares; batches and lengths stay.

    Raises:
        OptionError: if the budget is less than a step of each phase.
        RecipeError: if the recipe's schedules do not fit into so few steps.
    """
    whole = Cost(recipe, vocabulary).of(budget.unit, recipe.total_steps)
    share = budget.amount / whole
    shrunk = _scaled(recipe, [max(1, round(phase.steps * share)) for phase in recipe.phases])
    cost = Cost(shrunk, vocabulary)
    over = cost.of(budget.unit, shrunk.total_steps) - budget.amount
    last = shrunk.phases[-1].steps - round(over / cost.last_step(budget.unit))
    if last < 1:
        raise OptionError(
            f"--budget: {budget} are less than the phases of {recipe.name} take with a step each",
            remedy="give a larger budget, or smaller batches",
        )
    steps = [*(phase.steps for phase in shrunk.phases[:-1]), last]
    return reload(_scaled(recipe, steps), ())


def _scaled(recipe: Recipe, steps: list[int]) -> Recipe:
    """Return the recipe with `steps` steps in each phase."""
    phases = tuple(_phase(phase, count) for phase, count in zip(recipe.phases, steps, strict=True))
    schedule = _schedule(recipe.schedule, recipe.total_steps, sum(steps))
    return recipe.model_copy(update={"phases": phases, "schedule": schedule})


def _phase(phase: RecipePhase, steps: int) -> RecipePhase:
    changes: dict[str, object] = {"steps": steps}
    if phase.mixture is not None:
        changes["mixture"] = phase.mixture.model_copy(update={"steps": None})
    if phase.schedule is not None:
        changes["schedule"] = _schedule(phase.schedule, phase.steps, steps)
    if (rise := phase.batch.warmup) is not None:
        slower = rise.model_copy(update={"steps": max(1, min(steps, rise.steps * steps // phase.steps))})
        changes["batch"] = phase.batch.model_copy(update={"warmup": slower})
    return phase.model_copy(update=changes)


def _schedule(schedule: ScheduleConfig, was: int, steps: int) -> ScheduleConfig:
    warmup = schedule.warmup * steps // was
    decay = schedule.decay_steps and max(1, min(steps - warmup, schedule.decay_steps * steps // was))
    return schedule.model_copy(update={"warmup": warmup, "decay_steps": decay})
