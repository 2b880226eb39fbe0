"""Learning rates, by hand."""

import math

import pytest

from encoder_core.optim.schedules import ScheduleConfig, learning_rate


def _rates(config: ScheduleConfig, steps: list[int], total: int = 10) -> list[float]:
    return [learning_rate(config, peak=2.0, total=total, step=step) for step in steps]


def test_warmup_rises_by_equal_amounts_to_the_peak() -> None:
    config = ScheduleConfig(warmup=4)
    assert _rates(config, [0, 1, 2, 3, 4]) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_linear_decay_reaches_zero_after_the_last_step() -> None:
    config = ScheduleConfig(warmup=4, decay="linear")
    assert _rates(config, [4, 5, 7, 9, 10]) == pytest.approx([2.0, 2.0 * 5 / 6, 1.0, 2.0 / 6, 0.0])


def test_polynomial_decay_of_power_one_is_linear() -> None:
    config = ScheduleConfig(decay="polynomial", power=2.0)
    assert _rates(config, [0, 5, 9]) == pytest.approx([2.0, 0.5, 0.02])
    linear = ScheduleConfig(decay="linear")
    steps = list(range(11))
    assert _rates(ScheduleConfig(decay="polynomial"), steps) == _rates(linear, steps)


def test_cosine_decay_is_at_half_the_peak_half_way() -> None:
    config = ScheduleConfig(decay="cosine")
    assert _rates(config, [0, 5, 10]) == pytest.approx([2.0, 1.0, 0.0])
    assert _rates(config, [2])[0] == pytest.approx(1 + math.cos(math.pi * 0.2))


def test_constant_stays_at_the_peak_after_warmup() -> None:
    assert _rates(ScheduleConfig(warmup=2, decay="constant"), [0, 1, 2, 9, 10]) == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_the_floor_is_a_share_of_the_peak() -> None:
    config = ScheduleConfig(decay="linear", floor=0.1)
    assert _rates(config, [0, 5, 10, 15]) == pytest.approx([2.0, 1.1, 0.2, 0.2])


def test_the_published_schedule_of_roberta_large() -> None:
    """RoBERTa large: 4e-4, warmup 30k, linear to 0 over 500k steps."""
    config = ScheduleConfig(warmup=30_000)
    rates = [
        learning_rate(config, peak=4e-4, total=500_000, step=n) for n in (0, 14_999, 30_000, 265_000, 499_999)
    ]
    assert rates == pytest.approx([4e-4 / 30_000, 2e-4, 4e-4, 2e-4, 4e-4 / 470_000])


@pytest.mark.parametrize("decay", ["constant", "linear", "polynomial", "cosine"])
def test_no_step_has_rate_zero_and_none_is_above_the_peak(decay: str) -> None:
    config = ScheduleConfig.model_validate({"warmup": 3, "decay": decay})
    rates = _rates(config, list(range(10)))
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_run_that_is_all_warmup() -> None:
    assert _rates(ScheduleConfig(warmup=10), [0, 9]) == pytest.approx([0.2, 2.0])
