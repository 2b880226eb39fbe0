"""What a run does at which step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_core.optim import schedules
from encoder_core.optim.schedules import ScheduleConfig
from launcher.errors import RecipeError
from launcher.rank.build import schedule
from launcher.recipe import identity
from launcher.recipe.load import load, loads
from launcher.recipe.schema import BatchSize, Recipe, RecipePhase
from launcher.recipe.timeline import learning_rate, phase_at
from launcher.recipe.tiny import tiny

PEAK = 2.0


def phased(*phases: str, settings: tuple[str, ...] = ()) -> Recipe:
    each = ", ".join(f"{{length: 128, batch: {{sequences: 64}}, {phase}}}" for phase in phases)
    return load("roberta-base", (f"phases=[{each}]", "schedule.warmup=0", *settings))


SCHEDULES = st.builds(
    ScheduleConfig,
    warmup=st.integers(0, 5),
    decay=st.sampled_from(["linear", "cosine", "one_minus_sqrt"]),
    floor=st.sampled_from([0.0, 0.3]),
    decay_steps=st.none() | st.integers(1, 5),
)
PHASES = st.lists(
    st.builds(
        RecipePhase,
        steps=st.integers(10, 20),
        length=st.just(128),
        batch=st.just(BatchSize(sequences=64)),
        lr=st.none() | st.sampled_from([0.5, 4.0]),
        schedule=st.none() | SCHEDULES,
    ),
    min_size=1,
    max_size=4,
)
BASE = load("roberta-base")


@given(phases=PHASES, overall=SCHEDULES)
def test_the_rate_is_that_of_each_phase_in_turn(phases: list[RecipePhase], overall: ScheduleConfig) -> None:
    recipe = BASE.model_copy(update={"phases": tuple(phases), "schedule": overall})
    literal: list[float] = []
    for phase in phases:
        for step in range(phase.steps):
            config, at, total = overall, len(literal), recipe.total_steps
            if phase.schedule is not None:
                config, at, total = phase.schedule, step, phase.steps
            literal.append(schedules.learning_rate(config, peak=phase.lr or PEAK, total=total, step=at))
    backwards = [learning_rate(recipe, PEAK, step) for step in reversed(range(recipe.total_steps))]
    assert backwards[::-1] == literal, "a function of the step alone"


def test_the_phase_of_a_step() -> None:
    recipe = phased("steps: 3", "steps: 1", "steps: 2")
    assert [phase_at(recipe, step) for step in (0, 2, 3, 4, 5, 6)] == [
        (0, 0), (0, 0), (1, 3), (2, 4), (2, 4), (2, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "problem", "remedy"),
    [
        ("steps: 9, schedule: {warmup: 10}", "phases.1.schedule.warmup: a warmup of 10", "the phase"),
        (
            "steps: 9, schedule: {warmup: 5, decay_steps: 5}",
            "do not fit into the phase's 9",
            "at most 4 steps",
        ),
        ("steps: 9, schedule: {decay_steps: 3, restarts: 3}", "3 restarts leave", "restart less often"),
        ("steps: 9, schedule: {decay: constant, restarts: 1}", "does not decay", "phases.1.schedule"),
        ("steps: 9, lr: 0", "greater than 0", "phases.1.lr"),
    ],
)
def test_what_does_not_fit_is_refused(phase: str, problem: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        phased("steps: 20", phase)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_schedule_that_every_phase_replaces_need_not_fit() -> None:
    phase = "steps: 9, schedule: {decay: constant}"
    rate = schedule(phased(phase, settings=("schedule.warmup=1000",)))
    assert {rate(step) for step in range(9)} == {6e-4}


def test_recipes_of_before_are_the_runs_that_they_were() -> None:
    """None of the later keys is in their data by phase, nor in the identity of a run."""
    assert not {"lr", "schedule"} & BASE.phases[0].model_dump(mode="json").keys()
    assert not {"schedule.decay_steps", "schedule.restarts"} & identity.identity(BASE).keys()
    assert loads(BASE.to_yaml(), "again") == BASE
    changed = load("roberta-base", ("phases.0.lr=1e-4",))
    assert identity.diff(identity.identity(BASE), identity.identity(changed)) == [
        "- phases.0.lr: (absent) -> 0.0001"
    ]


def test_a_small_form_keeps_rates_and_schedules_in_proportion() -> None:
    recipe = phased(
        "steps: 600, schedule: {warmup: 60, decay: constant}",
        "steps: 400, lr: 6.0e-5, schedule: {decay: one_minus_sqrt, decay_steps: 200, restarts: 1}",
    )
    small = tiny(recipe)
    assert [phase.steps for phase in small.phases] == [1200, 800]
    assert small.phases[0].schedule == ScheduleConfig(warmup=120, decay="constant")
    assert small.phases[1].schedule == ScheduleConfig(decay="one_minus_sqrt", decay_steps=400, restarts=1)
    assert small.phases[1].lr == pytest.approx(schedule(small)(200) / 10)
