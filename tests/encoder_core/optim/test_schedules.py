"""Learning rates, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from encoder_core.optim.schedules import ScheduleConfig, learning_rate, schedule_parts


def _rates(config: ScheduleConfig, steps: list[int], total: int = 10) -> list[float]:
    return [learning_rate(config, peak=2.0, total=total, step=step) for step in steps]


def test_constant_stays_at_the_peak_after_warmup_and_a_run_may_be_all_warmup() -> None:
    assert _rates(ScheduleConfig(warmup=2, decay="constant"), [0, 1, 2, 9, 10]) == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert _rates(ScheduleConfig(warmup=10), [0, 9]) == pytest.approx([0.2, 2.0])


def test_polynomial_decay_is_linear_unless_it_is_given_a_power() -> None:
    linear, polynomial = ScheduleConfig(decay="linear"), ScheduleConfig(decay="polynomial")
    assert _rates(polynomial, list(range(11))) == _rates(linear, list(range(11)))


@given(warmup=st.integers(0, 50), total=st.integers(1, 200))
def test_inverse_sqrt_depends_on_the_updates_so_far_only(warmup: int, total: int) -> None:
    """The XLM authors' optimizer: update n of a warmup of W has peak n / W, and peak (W / n) ** 0.5 from W on."""
    config, first = ScheduleConfig(warmup=warmup, decay="inverse_sqrt"), max(1, warmup)
    expected = [2.0 * (n / first if n <= first else (first / n) ** 0.5) for n in range(1, total + 1)]
    assert _rates(config, list(range(total)), total) == pytest.approx(expected)
    assert _rates(config, list(range(total)), 10**6) == _rates(config, list(range(total)), total)
    starts = [(0, "warmup")] * (warmup > 0) + [(warmup, "inverse_sqrt")] * (warmup < total)
    assert schedule_parts(config, total) == starts


@pytest.mark.parametrize(
    ("decay", "unused"),
    [
        *(("inverse_sqrt", unused) for unused in ({"decay_steps": 5}, {"restarts": 1}, {"floor": 0.1})),
        *(("constant", unused) for unused in ({"decay_steps": 5}, {"restarts": 1})),
    ],
)
def test_a_decay_without_an_end_takes_none(decay: str, unused: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=rf"\b{decay}\b"):
        ScheduleConfig.model_validate({"decay": decay, **unused})


SHAPES = {  # share of the height above the floor, when a share x of the decay is done
    "linear": lambda x: 1 - x,
    "polynomial": lambda x: (1 - x) ** 3,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "one_minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@given(
    stretches=st.tuples(*[st.integers(0, 40)] * 2, st.integers(1, 40)),
    restarts=st.integers(0, 3),
    decay=st.sampled_from(sorted(SHAPES)),
    floor=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_schedule_is_its_literal_statement(
    stretches: tuple[int, int, int], restarts: int, decay: str, floor: float
) -> None:
    """Step by step: up, level, down in even cycles. It never jumps but where it restarts."""
    warmup, stable, cycle = stretches
    falling = cycle * (restarts + 1)
    config = ScheduleConfig.model_validate(
        {"warmup": warmup, "decay": decay, "power": 3, "floor": floor} | {"decay_steps": falling, "restarts": restarts}
    )
    literal = [(step + 1) / warmup for step in range(warmup)] + [1.0] * stable
    heights = [SHAPES[decay](step / cycle) for step in range(cycle)] * (restarts + 1)
    literal += [floor + (1 - floor) * height for height in heights]
    total = len(literal)
    found = [learning_rate(config, peak=3.0, total=total, step=step) for step in range(total)]
    assert found == pytest.approx([3.0 * share for share in literal])
    assert found[warmup : warmup + stable + 1] == [3.0] * (stable + 1), "no jump from warmup to decay"
    level = ScheduleConfig.model_validate(config.model_dump() | {"decay_steps": None})
    if not stable:
        assert [learning_rate(level, peak=3.0, total=total, step=step) for step in range(total)] == found
    for step in (total, total + 5):
        assert learning_rate(config, peak=3.0, total=total, step=step) == 3.0 * floor


@given(warmup=st.integers(0, 9), stable=st.integers(0, 9), falling=st.integers(1, 60), data=st.data())
def test_every_restart_is_at_the_peak_and_cycles_are_as_long_as_each_other(
    warmup: int, stable: int, falling: int, data: st.DataObject
) -> None:
    restarts = data.draw(st.integers(0, falling - 1))
    total = warmup + stable + falling
    config = ScheduleConfig(warmup=warmup, decay="linear", decay_steps=falling, restarts=restarts)
    starts = [step for step, name in schedule_parts(config, total) if name == "linear"]
    rates = [learning_rate(config, peak=2.0, total=total, step=step) for step in range(total)]
    assert len(starts) == restarts + 1
    lengths = {stop - start for start, stop in zip(starts, [*starts[1:], total], strict=True)}
    assert max(lengths) - min(lengths) <= 1
    for start, stop in zip(starts, [*starts[1:], total], strict=True):
        length = stop - start
        assert rates[start:stop] == pytest.approx([2.0 * (1 - n / length) for n in range(length)])


def test_the_parts_of_a_schedule_have_names() -> None:
    config = ScheduleConfig(warmup=2, decay="cosine", decay_steps=4, restarts=1)
    assert schedule_parts(config, 10) == [(0, "warmup"), (2, "stable"), (6, "cosine"), (8, "cosine")]
    assert schedule_parts(ScheduleConfig(decay="constant"), 10) == [(0, "stable")]
    assert schedule_parts(ScheduleConfig(warmup=10), 10) == [(0, "warmup")]
