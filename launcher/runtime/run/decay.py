"""Changes a recipe with a stable learning rate so that the rate decays from a given checkpoint on.

So a warmup-stable-decay run can be ended at any of its checkpoints, in a fork, while the run itself goes on at the peak
rate (Hu et al. 2024, "MiniCPM", section 4).
"""

from encoder_core.optim.schedules import ScheduleConfig
from launcher.errors import RunError
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import curve_at, phase_at


def decaying(recipe: Recipe, step: int, steps: int) -> Recipe:
    """Return `recipe` up to `step` with `steps` more of the same phase, in which the rate decays to the schedule's
    floor: along the schedule's decay, or by 1 - sqrt if it has none. Later phases are left out.

    Raises RunError: the rate is not stable before `step`.
    """
    last = max(0, step - 1)  # the last step that was trained; the first step if there is none
    number, start = phase_at(recipe, last)
    curve = curve_at(recipe, last)
    if curve != "stable":
        how = "still rises" if curve == "warmup" else "decays already"
        raise RunError(
            f"the learning rate {how} at step {step:,}, so there is no stable stretch to decay from",
            remedy="take a checkpoint of a stable stretch (--step); `maskfleet recipe show RECIPE --timeline` shows "
            "where the recipe has one, and schedule.decay_steps makes one",
        )
    phase = recipe.phases[number]
    changes: dict[str, object] = {"steps": step - start + steps}
    if phase.schedule is not None:
        changes["schedule"] = _decaying(phase.schedule, steps)
    ended = recipe.model_copy(update={"phases": (*recipe.phases[:number], phase.model_copy(update=changes))})
    if phase.schedule is not None:
        return ended
    return ended.model_copy(update={"schedule": _decaying(recipe.schedule, steps)})


def _decaying(schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
    decay = "one_minus_sqrt" if schedule.decay == "constant" else schedule.decay
    return schedule.model_copy(update={"decay": decay, "decay_steps": steps, "restarts": 0})
