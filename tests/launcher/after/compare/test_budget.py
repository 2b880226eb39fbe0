"""What a run takes, and recipes at a budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_core.optim.schedules import ScheduleConfig
from launcher.after.compare.arguments import Budget, Unit
from launcher.after.compare.budget import Cost, within
from launcher.errors import OptionError
from launcher.runtime.capacity.workload import microbatch_flops, microbatch_shape
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.timeline import phase_at, step_batches

VOCABULARY = 320
BASE = load(
    "roberta-base",
    (
        "phases=[{steps: 30, length: 64, batch: {sequences: 64, warmup: {start: 16, steps: 12}}},"
        "{steps: 20, length: 128, batch: {tokens: 4096}, schedule: {warmup: 2, decay_steps: 10}}]",
        "schedule={warmup: 6, decay: linear, decay_steps: 20}",
        *("microbatch=16", "model.layers=2", "model.hidden=32", "model.heads=2", "model.feed_forward=64"),
        "model.vocab=null",
    ),
)


def test_a_cost_is_the_sum_of_its_steps() -> None:
    cost, tokens, flops = Cost(BASE, VOCABULARY), 0, 0.0
    known = BASE.model_copy(update={"model": BASE.model.model_copy(update={"vocab": VOCABULARY})})
    for step in range(BASE.total_steps):
        number, start = phase_at(BASE, step)
        phase = BASE.phases[number]
        shape = microbatch_shape(known, phase)
        batch = step_batches(BASE, phase).at(step - start)
        taken = batch if phase.batch.tokens else batch * phase.length
        tokens, flops = tokens + taken, flops + taken / shape.tokens * microbatch_flops(known, shape).model
        assert cost.tokens(step + 1) == tokens
        assert cost.flops(step + 1) == pytest.approx(flops, rel=1e-12)


@given(unit=st.sampled_from(["tokens", "flops"]), share=st.floats(0.2, 20))
def test_a_recipe_takes_its_budget_to_the_nearest_step(unit: Unit, share: float) -> None:
    amount = share * Cost(BASE, VOCABULARY).of(unit, BASE.total_steps)
    found = within(BASE, Budget(unit, amount), VOCABULARY)
    cost = Cost(found, VOCABULARY)
    assert abs(cost.of(unit, found.total_steps) - amount) <= 0.5001 * cost.last_step(unit)
    shares = [phase.steps / found.total_steps for phase in found.phases]
    assert shares == pytest.approx([0.6, 0.4], abs=0.13)
    assert [phase.length for phase in found.phases] == [64, 128]
    assert found.phases[0].batch.sequences == 64
    assert found.schedule.warmup <= found.total_steps - (found.schedule.decay_steps or 0)
    assert found.schedule == ScheduleConfig(
        warmup=6 * found.total_steps // 50,
        decay="linear",
        decay_steps=max(1, 20 * found.total_steps // 50),
    )


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("tokens=8M", "tokens", 8e6),
        ("tokens=2500", "tokens", 2500),
        ("flops=2.5e15", "flops", 2.5e15),
        ("flops=3P", "flops", 3e15),
        ("tokens=1.5B", "tokens", 1.5e9),
        ("flops=1E", "flops", 1e18),
    ],
)
def test_a_budget_is_read(text: str, unit: str, amount: float) -> None:
    assert Budget.parse(text) == Budget(unit, amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["8M", "tokens=", "tokens=0", "steps=5", "tokens=-1", "tokens=8X", "flops=nan"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--budget \S+.*: "):
        Budget.parse(text)


def test_a_budget_of_less_than_a_step_of_each_phase_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--budget: .*\bstep\b"):
        within(BASE, Budget("tokens", 100), VOCABULARY)
