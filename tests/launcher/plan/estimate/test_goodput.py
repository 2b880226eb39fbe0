"""Intervals and goodput against the literature's formulas, and against a simulation."""

import random

import pytest

from launcher.plan.estimate.estimate import CheckpointTimes, best_interval_s, daly_interval_s, goodput, young_interval_s

HOUR = 3600.0


def test_young_and_daly_agree_where_failures_are_rare() -> None:
    assert young_interval_s(60, 24 * HOUR) == pytest.approx((2 * 60 * 24 * HOUR) ** 0.5)
    assert daly_interval_s(60, 1000 * HOUR) == pytest.approx(young_interval_s(60, 1000 * HOUR), rel=0.01)


def test_where_saving_takes_longer_than_machines_last_the_interval_is_their_life() -> None:
    assert daly_interval_s(3 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize("blocked", [5.0, 60.0, 600.0])
def test_no_other_interval_has_more_goodput(blocked: float) -> None:
    saving = CheckpointTimes(blocked, behind=0.0, restart=120.0)
    best = best_interval_s(saving, 6 * HOUR)
    at_best = goodput(saving, best, 6 * HOUR)
    assert all(goodput(saving, best * factor, 6 * HOUR) < at_best + 1e-4 for factor in (0.3, 0.6, 0.9, 1.1, 1.6, 3))


def test_an_interval_is_no_shorter_than_a_save() -> None:
    assert best_interval_s(CheckpointTimes(0.01, behind=900.0, restart=60.0), HOUR) == 900.0


def test_machines_that_fail_all_the_time_get_nothing_done() -> None:
    assert goodput(CheckpointTimes(10.0, 10.0, 7200.0), 600.0, 60.0) == 0.0


def test_goodput_is_that_of_a_simulated_run() -> None:
    """Work of an interval counts when its save is over before the next failure; restarts may fail too."""
    saving, interval, mtbf = CheckpointTimes(20.0, 0.0, 100.0), 1200.0, 4000.0
    draw, wall, done = random.Random(7), 0.0, 0
    failure = draw.expovariate(1 / mtbf)
    restarting = False
    while done < 20_000:
        span = interval + saving.blocked + (saving.restart if restarting else 0.0)
        if wall + span <= failure:
            wall, done, restarting = wall + span, done + 1, False
        else:
            wall, restarting = failure, True
            failure = wall + draw.expovariate(1 / mtbf)
    assert goodput(saving, interval, mtbf) == pytest.approx(done * interval / wall, rel=0.02)
