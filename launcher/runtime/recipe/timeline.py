"""Phase, learning rate, batch, tokens and weights of terms, as pure functions of a run's step."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from data_service.stream.positions import BatchRamp, BatchSchedule
from encoder_core.objectives.term import WeightSchedule, weight_at
from encoder_core.optim import schedules
from launcher.runtime.recipe.phases import recipe_in_phase
from launcher.runtime.recipe.schema import Recipe, RecipePhase


@dataclass(frozen=True)
class TimelineSegment:
    """Steps `first` to `last`, both included, of one phase, in which the learning rate follows one curve.

    Attributes:
        phase: number of the phase.
        curve: warmup, stable, or the name of a decay.
        rates: learning rates of the first and last step.
        batches: batches of the first and last step, in rows or tokens.
        tokens: number of tokens from the run's beginning to the end of the segment, as if all rows were full.
        weights: weights in the first and last step, by term, of each term whose weight changes.
    """

    phase: int
    first: int
    last: int
    curve: str
    rates: tuple[float, float]
    batches: tuple[int, int]
    tokens: int
    weights: Mapping[str, tuple[float, float]]


def phase_at(recipe: Recipe, step: int) -> tuple[int, int]:
    """Return the number of a step's phase, and the phase's first step. Steps after the last are in the last phase."""
    starts = [0, *accumulate(phase.steps for phase in recipe.phases[:-1])]
    number = bisect_right(starts, step) - 1
    return number, starts[number]


def recipe_at(recipe: Recipe, step: int) -> Recipe:
    """Return the recipe for a step: the settings of the step's phase replace the recipe's own."""
    number, _ = phase_at(recipe, step)
    return recipe_in_phase(recipe, recipe.phases[number])


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step, counted from 0. Its peak is the optimizer's, unless the phase has its own.

    A phase's own schedule counts the steps of the phase from 0. The run's schedule counts the steps of all phases, also
    of phases with their own schedule.
    """
    number, start = phase_at(recipe, step)
    phase = recipe.phases[number]
    peak = recipe.optimizer.settings.lr if phase.lr is None else phase.lr
    if phase.schedule is None:
        return schedules.learning_rate(recipe.schedule, peak=peak, total=recipe.total_steps, step=step)
    return schedules.learning_rate(phase.schedule, peak=peak, total=phase.steps, step=step - start)


def batch_schedule(recipe: Recipe, phase: RecipePhase) -> BatchSchedule:
    """Return the batch of each step of a phase, in the recipe's unit: rows or tokens."""
    rows, tokens, warmup = phase.batch.sequences, phase.batch.tokens, phase.batch.warmup
    full = rows or tokens
    assert full is not None  # a batch has exactly one of the two
    if warmup is None:
        return BatchSchedule(full)
    granule = 1 if rows else phase.length
    return BatchSchedule(full, BatchRamp(warmup.start, warmup.steps, granule))


def tokens_before(recipe: Recipe, step: int) -> int:
    """Return the number of tokens of the first `step` steps, as if all rows were full."""
    total = 0
    for phase in recipe.phases:
        units = batch_schedule(recipe, phase).units_before(min(phase.steps, step))
        each = 1 if phase.batch.tokens else recipe.input.texts_per_row * phase.length
        total, step = total + units * each, max(0, step - phase.steps)
    return total


def recipe_after(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with the model settings after `steps` steps, as a checkpoint of that step has them."""
    return recipe.model_copy(update={"model": recipe_at(recipe, max(0, steps - 1)).model})


def causal_after(recipe: Recipe, steps: int) -> bool:
    """Return whether the last of `steps` steps trained next-token prediction, on causal rows."""
    return recipe_at(recipe, max(0, steps - 1)).objective.causal


def term_weights(recipe: Recipe, step: int) -> dict[str, float]:
    """Return the weights in a step, by term, of all terms whose weight changes (`changing_weights`)."""
    number, start = phase_at(recipe, step)
    own = recipe.phases[number].weights or {}
    of_run = {
        name: weight_at(recipe.objective.terms[name].weight, step)
        for name in changing_weights(recipe)
        if name not in own
    }
    return of_run | {name: weight_at(weight, step - start) for name, weight in own.items()}


def changing_weights(recipe: Recipe) -> list[str]:
    """Return the terms whose weight is a schedule, or is set by at least one phase."""
    set_by_phases = {name for phase in recipe.phases for name in phase.weights or {}}
    return [
        name
        for name, term in recipe.objective.terms.items()
        if isinstance(term.weight, WeightSchedule) or name in set_by_phases
    ]


def curve_name_at(recipe: Recipe, step: int) -> str:
    """Return the part of the schedule at a step: warmup, stable, or the name of a decay."""
    number, start = phase_at(recipe, step)
    return [name for first, name in _schedule_parts(recipe, recipe.phases[number], start) if first <= step][-1]


def timeline(recipe: Recipe) -> list[TimelineSegment]:
    """Return the segments of the run from its first step to its last. A segment ends wherever a phase, a part of a
    schedule, or a rise of the batch begins or ends."""
    found: list[TimelineSegment] = []
    start = 0
    for number, phase in enumerate(recipe.phases):
        batches, stop = batch_schedule(recipe, phase), start + phase.steps
        curves = _schedule_parts(recipe, phase, start)
        edges = {step for step, _ in curves if start < step < stop} | {start, stop}
        if batches.rise is not None:
            edges |= {min(start + batches.rise.steps, stop)}
        edges |= {step for step in _weight_schedule_ends(recipe, phase, start) if start < step < stop}
        for first, end in pairwise(sorted(edges)):
            found.append(
                TimelineSegment(
                    phase=number,
                    first=first,
                    last=end - 1,
                    curve=[name for step, name in curves if step <= first][-1],
                    rates=(learning_rate(recipe, first), learning_rate(recipe, end - 1)),
                    batches=(batches.batch_at_step(first - start), batches.batch_at_step(end - 1 - start)),
                    tokens=tokens_before(recipe, end),
                    weights=_weights_at_ends(recipe, first, end - 1),
                )
            )
        start = stop
    return found


def _weight_schedule_ends(recipe: Recipe, phase: RecipePhase, start: int) -> list[int]:
    """Return the steps of the run at which the weight schedules of a phase's terms end."""
    own = phase.weights or {}
    ends = [start + weight.steps for weight in own.values() if isinstance(weight, WeightSchedule)]
    of_run = [term.weight for name, term in recipe.objective.terms.items() if name not in own]
    return ends + [weight.steps for weight in of_run if isinstance(weight, WeightSchedule)]


def _weights_at_ends(recipe: Recipe, first: int, last: int) -> dict[str, tuple[float, float]]:
    end = term_weights(recipe, last)
    return {name: (weight, end[name]) for name, weight in term_weights(recipe, first).items()}


def _schedule_parts(recipe: Recipe, phase: RecipePhase, start: int) -> list[tuple[int, str]]:
    """Return, for each part of the schedule that a phase follows, its first step in the run and its name."""
    if phase.schedule is None:
        return schedules.schedule_parts(recipe.schedule, recipe.total_steps)
    return [(start + step, name) for step, name in schedules.schedule_parts(phase.schedule, phase.steps)]
