"""What a run does at which step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_core.objectives.term import Weight, WeightSchedule, weight_at
from encoder_core.optim import schedules
from encoder_core.optim.schedules import ScheduleConfig
from launcher.errors import OptionError, RecipeError
from launcher.runtime.rank.build import training_plan
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.load import load, parse_recipe
from launcher.runtime.recipe.phases import layer_settings
from launcher.runtime.recipe.schema import BatchSize, Recipe, RecipePhase
from launcher.runtime.recipe.timeline import (
    batch_schedule,
    changing_weights,
    learning_rate,
    phase_at,
    recipe_after,
    term_weights,
    timeline,
    tokens_before,
)
from launcher.runtime.recipe.tiny import tiny
from tests.support.checks.command import maskfleet

RISE = "{sequences: 64, warmup: {start: %d, steps: %d}}"


def phased(*phases: str, settings: tuple[str, ...] = ()) -> Recipe:
    batch = "batch: {sequences: 64}, "
    each = ", ".join(f"{{length: 128, {'' if 'batch' in phase else batch}{phase}}}" for phase in phases)
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
    peak = recipe.optimizer.settings.lr
    for phase in phases:
        for step in range(phase.steps):
            config, at, total = overall, len(literal), recipe.total_steps
            if phase.schedule is not None:
                config, at, total = phase.schedule, step, phase.steps
            literal.append(schedules.learning_rate(config, peak=phase.lr or peak, total=total, step=at))
    backwards = [learning_rate(recipe, step) for step in reversed(range(recipe.total_steps))]
    assert backwards[::-1] == literal, "a function of the step alone"


def test_the_phase_of_a_step() -> None:
    recipe = phased("steps: 3", "steps: 1", "steps: 2")
    assert [phase_at(recipe, step) for step in (0, 2, 3, 4, 5, 6)] == [
        (0, 0), (0, 0), (1, 3), (2, 4), (2, 4), (2, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "problem"),
    [
        ("steps: 9, schedule: {warmup: 10}", "phases.1.schedule.warmup: a warmup of 10"),
        ("steps: 9, schedule: {warmup: 5, decay_steps: 5}", "do not fit into the phase's 9"),
        ("steps: 9, schedule: {decay_steps: 3, restarts: 3}", "3 restarts leave"),
        ("steps: 9, schedule: {decay: constant, restarts: 1}", "does not decay"),
        ("steps: 9, lr: 0", "greater than 0"),
        ("steps: 9, mlm: {rate: {start: 0.3, end: 0.1}}", "needs phases that continue the sources"),
        ("steps: 9, mixture: {}, mlm: {rate: {start: 0.9, end: 0.1}}", "less than or equal to 0.8"),
        ("steps: 9, rope_base: 1.0e+4", "family roberta has no rotary positions"),
        ("steps: 9, local_rope_base: 1.0e+4", "no local layers"),
        ("steps: 9, mlm: {rate: 0.9}", "less than or equal to 0.8"),
        (f"steps: 9, batch: {RISE % (128, 5)}", "rises from 128 to 64"),
        (f"steps: 9, batch: {RISE % (0, 5)}", "greater than 0"),
        (f"steps: 9, batch: {RISE % (16, 10)}", "takes 10 steps, but the phase has 9"),
        ("steps: 9, batch: {tokens: 999, warmup: {start: 50, steps: 3}}", "cannot hold one row of 128"),
    ],
)
def test_what_does_not_fit_is_refused(phase: str, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        phased("steps: 20", phase)
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_schedule_that_every_phase_replaces_need_not_fit() -> None:
    phase = "steps: 9, schedule: {decay: constant}"
    recipe = phased(phase, settings=("schedule.warmup=1000",))
    assert {learning_rate(recipe, step) for step in range(9)} == {6e-4}


def test_a_phase_without_keys_of_its_own_has_none_in_its_data() -> None:
    assert not {"lr", "schedule", "mlm"} & BASE.phases[0].model_dump(mode="json").keys()
    assert parse_recipe(BASE.to_yaml(), "again") == BASE
    changed = load("roberta-base", ("phases.0.lr=1e-4",))
    assert identity.diff_lines(identity.identity_fields(BASE), identity.identity_fields(changed)) == [
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
    assert small.phases[1].lr == pytest.approx(learning_rate(small, 200) / 10)


@pytest.mark.parametrize(("unit", "start", "batch"), [("sequences", 16, 32), ("tokens", 16 * 32, 32 * 32)])
def test_a_small_form_has_a_batch_that_rises(unit: str, start: int, batch: int) -> None:
    risen = 1 if unit == "sequences" else 128
    rise = f"{{{unit}: {512 * risen}, warmup: {{start: {64 * risen}, steps: 30}}}}"
    small = tiny(phased(f"steps: 60, batch: {rise}", "steps: 40")).phases[0]
    assert small.batch.model_dump(exclude_none=True) == {
        unit: batch,
        "warmup": {"start": start, "steps": 600},
    }


def test_what_only_some_objectives_have_is_refused_with_the_others() -> None:
    changed = "phases=[{steps: 10, length: 512, batch: {sequences: 8192%s}%s}]"
    rise = ", warmup: {start: 2048, steps: 5}"
    for name, settings, problem in (
        ("xlnet-base", changed % (rise, ""), "lanes needs the same number of rows in each step"),
        (
            "xlnet-base",
            changed % ("", ", mlm: {rate: 0.3}"),
            "changes the masks of mlm, but the objective has no mlm",
        ),
        ("contrastive-base", changed % (rise, ""), "one_source needs the same number of rows in each step"),
    ):
        with pytest.raises(RecipeError, match=problem):
            load(name, (settings, "schedule.warmup=0"))


FULL = phased(
    "steps: 60, batch: {sequences: 512, warmup: {start: 128, steps: 20}}, mlm: {rate: 0.3}",
    "steps: 30, length: 512, batch: {tokens: 65536}, lr: 1.0e-4",
    "steps: 10, schedule: {decay: one_minus_sqrt, decay_steps: 5}",
    settings=("schedule={warmup: 8, decay: constant}",),
)


def test_a_timeline_is_cut_where_something_changes() -> None:
    found = timeline(FULL)
    assert [(at.phase, at.first, at.last, at.curve) for at in found] == [
        (0, 0, 7, "warmup"),
        (0, 8, 19, "stable"),
        (0, 20, 59, "stable"),
        (1, 60, 89, "stable"),
        (2, 90, 94, "stable"),
        (2, 95, 99, "one_minus_sqrt"),
    ]
    assert [at.batches for at in found[:4]] == [(128, 262), (281, 492), (512, 512), (65536, 65536)]
    assert found[3].rates == (1e-4, 1e-4)
    assert found[-1].tokens == tokens_before(FULL, 100)


NUMBERS = st.floats(0.1, 9)
LINES = st.builds(WeightSchedule, start=st.floats(0, 9), end=NUMBERS, steps=st.integers(1, 60))


@pytest.mark.long
@given(run=NUMBERS | LINES, own=st.lists(st.none() | NUMBERS | LINES, min_size=1, max_size=4))
def test_a_term_weighs_in_each_step_what_its_phase_or_the_run_says(run: Weight, own: list[Weight | None]) -> None:
    bert = load("bert-base")
    assert bert.objective.nsp is not None
    objective = bert.objective.model_copy(update={"nsp": bert.objective.nsp.model_copy(update={"weight": run})})
    phases = tuple(
        RecipePhase(
            steps=20,
            length=128,
            batch=BatchSize(sequences=64),
            weights=None if weight is None else {"nsp": weight},
        )
        for weight in own
    )
    recipe = bert.model_copy(update={"objective": objective, "phases": phases})
    changes = isinstance(run, WeightSchedule) or any(weight is not None for weight in own)
    literal = []
    for number, weight in enumerate(own):
        for step in range(20):
            literal.append(weight_at(run, 20 * number + step) if weight is None else weight_at(weight, step))
    assert changing_weights(recipe) == (["nsp"] if changes else [])
    for step, expected in enumerate(literal):
        assert term_weights(recipe, step) == ({"nsp": expected} if changes else {})
    for at in timeline(recipe) if changes else ():
        assert at.weights == {"nsp": (literal[at.first], literal[at.last])}
        inside = literal[at.first : at.last + 1]
        line = np.linspace(inside[0], inside[-1], len(inside))
        assert inside == pytest.approx(line), "a row of the table is one straight line"
    assert tiny(recipe).objective.nsp is not None


def test_tokens_are_those_of_every_step() -> None:
    total = 0
    for step in range(FULL.total_steps + 1):
        assert tokens_before(FULL, step) == total
        number, start = phase_at(FULL, step)
        phase = FULL.phases[number]
        batch = batch_schedule(FULL, phase).batch_at_step(step - start)
        total += batch if phase.batch.tokens else batch * phase.length


def test_the_command_prints_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = tmp_path / "mine.yaml"
    path.write_text(FULL.to_yaml())
    shown = maskfleet("recipe", "show", str(path), "--timeline")
    lines = shown.splitlines()
    assert lines[1].split() == [
        *("0", "0", "-", "7", "199.6k", "128", "128", "to", "262", "rows", "7.5e-05", "to", "0.0006"),
        *("warmup", "0.3:", "0.8", "mask,", "0.1", "random,", "0.1", "kept"),
    ]
    with pytest.raises(OptionError, match=r"--raw\b.*--timeline\b"):
        maskfleet("recipe", "show", str(path), "--timeline", "--raw")


@pytest.mark.long
@given(own=st.lists(st.none() | st.sampled_from([1e4, 5e5]), min_size=1, max_size=4))
def test_the_base_of_rotary_positions_is_the_phases_or_the_models(own: list[float | None]) -> None:
    base = load("modernbert-base")
    phases = tuple(RecipePhase(steps=3, length=128, batch=BatchSize(sequences=64), rope_base=value) for value in own)
    recipe = base.model_copy(update={"phases": phases})
    literal = [value or 160_000.0 for value in own for _ in range(3)]
    layers = training_plan(recipe).layers
    assert [layers(step).get("rope_base", 160_000.0) for step in range(recipe.total_steps)] == literal
    for steps, expected in enumerate([literal[0], *literal]):
        made = recipe_after(recipe, steps).model
        assert made == base.model.model_copy(update={"global_rope_base": expected})


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("phase", [0, 1])
def test_the_base_of_layers_that_see_the_whole_row_is_the_phases(layers: int, phase: int) -> None:
    """In an UltraBERT these are not the first, and a small one has none."""
    own = ("model.local_attention=128", "model.head_width=64", "model.rotary_base=160000.0", f"model.layers={layers}")
    each = "steps: 9, length: 128, batch: {sequences: 64}"
    phases = f"phases=[{{{each}, rope_base: 20000.0}}, {{{each}, rope_base: 500000.0}}]"
    recipe = load("eurobert-210m", (phases, "microbatch=4", "schedule.warmup=0", *own))
    base = (20_000.0, 500_000.0)[phase]
    assert layer_settings(recipe, recipe.phases[phase])["rope_base"] == base
    assert recipe_after(recipe, 9 * phase + 3).model == recipe.model.model_copy(update={"rotary_base": base})


@pytest.mark.parametrize("model", ["modernbert", "ultrabert"])
def test_the_base_of_local_layers_is_the_phases_where_there_are_such(model: str) -> None:
    own = {"ultrabert": ("model.local_attention=128", "model.head_width=64"), "modernbert": ()}[model]
    name = {"ultrabert": "eurobert-210m", "modernbert": "modernbert-base"}[model]
    phases = "phases=[{steps: 9, length: 128, batch: {sequences: 64}, local_rope_base: 70}]"
    recipe = load(name, (phases, "microbatch=4", "schedule.warmup=0", *own))
    assert layer_settings(recipe, recipe.phases[0])["local_rope_base"] == 70.0
    made = recipe_after(recipe, 3).model
    assert made == recipe.model.model_copy(update={"local_rope_base": 70.0})
    if model == "ultrabert":
        with pytest.raises(RecipeError, match="no local layers"):
            load(name, ("phases.0.local_rope_base=70",))
