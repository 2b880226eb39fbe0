"""A recipe that decays from a stable stretch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RunError
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.timeline import learning_rate
from launcher.runtime.run.fork import with_decay

PHASE = "{steps: %d, length: 128, batch: {sequences: 64}%s}"
OVERALL = load(
    "roberta-base",
    (
        f"phases=[{PHASE % (20, '')}, {PHASE % (30, ', lr: 1.0e-4')}, {PHASE % (9, '')}]",
        "schedule={warmup: 5, decay: linear, decay_steps: 4, floor: 0.1}",
    ),
)
OWN = load(
    "roberta-base",
    (
        f"phases=[{PHASE % (20, '')}, {PHASE % (30, ', schedule: {warmup: 6, decay: constant}')}]",
        "schedule={warmup: 5, decay: constant}",
    ),
)


@given(step=st.integers(6, 54), steps=st.integers(1, 40))
def test_the_rate_is_as_it_was_and_then_decays_from_there(step: int, steps: int) -> None:
    found = with_decay(OVERALL, step, steps)
    assert found.total_steps == step + steps
    assert [learning_rate(found, n) for n in range(step)] == [learning_rate(OVERALL, n) for n in range(step)]
    peak = learning_rate(OVERALL, step - 1)
    assert [learning_rate(found, step + n) for n in range(steps)] == pytest.approx(
        [peak * (0.1 + 0.9 * (1 - n / steps)) for n in range(steps)]
    )
    assert with_assignments(found, ()) == found, "a recipe like any other"


def test_a_phase_with_a_schedule_of_its_own_decays_by_that() -> None:
    found = with_decay(OWN, 40, 16)
    assert [phase.steps for phase in found.phases] == [20, 36]
    assert found.schedule == OWN.schedule
    assert [learning_rate(found, n) for n in (39, 40, 44)] == [6e-4, 6e-4, 3e-4]
    first = with_decay(OWN, 20, 4)  # the step where phase 0 has ended, and phase 1 has not begun
    assert [phase.steps for phase in first.phases] == [24]
    assert learning_rate(first, 21) == 3e-4


@pytest.mark.parametrize(
    ("step", "problem"), [(4, "is still rising at step 4"), (57, "is already decaying at step 57")]
)
def test_what_is_not_stable_is_refused(step: int, problem: str) -> None:
    with pytest.raises(RunError, match=problem) as caught:
        with_decay(OVERALL, step, 10)
    assert "--timeline" in caught.value.remedy
