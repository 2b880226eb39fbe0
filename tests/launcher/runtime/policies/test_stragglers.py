"""Who makes the others wait: rows of paces, and what is to be said of them."""

from collections.abc import Sequence

import pytest

from encoder_core.train.settings import Pace
from launcher.runtime.policies.stragglers import SLOW_WINDOWS, Straggler, StragglerDetector, Stragglers, rank_slowness
from launcher.runtime.recipe.parts import WeightCheck

TOKENS, SECOND = 1000, 1.0
SETTINGS = Stragglers(window=4, ratio=1.5)


def paces(forward: Sequence[float], data: Sequence[float] | None = None) -> tuple[Pace, ...]:
    """A step of ranks with these seconds; forward passes of `TOKENS` tokens."""
    return tuple(Pace(wait, busy, TOKENS) for busy, wait in zip(forward, data or [0.01] * len(forward), strict=True))


def feed(detector: StragglerDetector, steps: int, *args: Sequence[float]) -> list[Straggler]:
    return [slow for _ in range(steps) for slow in detector.add_step(paces(*args), SECOND)]


@pytest.mark.parametrize(
    ("forward", "data", "ratios", "doing"),
    [
        ([0.1, 0.1, 0.1], [0.01, 0.01, 0.01], [1, 1, 1], "compute"),
        ([0.1, 0.2, 0.1], [0.01, 0.01, 0.01], [1, 2, 1], "compute"),
        ([0.1, 0.2], [0.01, 0.01], [1, 2], "compute"),  # of two, each is held against the other
        ([0.1, 0.1, 0.1], [0.0, 0.5, 0.0], [1, 2, 1], "data"),  # half of each second is that rank's wait
        ([0.1, 0.1, 0.1], [0.5, 0.5, 0.5], [1, 1, 1], "compute"),  # the data service is slow, nobody else
        (
            [0.1, 0.1, 0.1],
            [0.0001, 0.02, 0.0001],
            [1, 1.02, 1],
            "data",
        ),  # 200 times as long, and of no weight
    ],
)
def test_slowness_is_the_ratio_to_the_median_and_says_at_what(
    forward: list[float], data: list[float], ratios: list[float], doing: str
) -> None:
    found = rank_slowness([(paces(forward, data), SECOND)] * 3, forward=True)
    assert [s.ratio for s in found] == pytest.approx(ratios, rel=0.01)
    assert max(found, key=lambda s: s.ratio).doing == doing


def test_half_of_the_ranks_may_be_slow_and_the_median_still_holds() -> None:
    found = rank_slowness([(paces([0.1, 0.1, 0.1, 0.3, 0.3]), SECOND)], forward=True)
    assert [s.rank for s in found if s.ratio >= 1.5] == [3, 4]


def test_computing_is_counted_by_the_token() -> None:
    twice_the_work = (Pace(0, 0.1, TOKENS), Pace(0, 0.2, 2 * TOKENS), Pace(0, 0.1, TOKENS))
    assert [s.ratio for s in rank_slowness([(twice_the_work, SECOND)], forward=True)] == pytest.approx([1, 1, 1])


def test_a_rank_without_tokens_is_not_judged() -> None:
    idle = (Pace(0, 0.1, TOKENS), Pace(0, 0.0, 0), Pace(0, 0.1, TOKENS))
    assert all(s.ratio < 1.5 for s in rank_slowness([(idle, SECOND)], forward=True))
    assert all(s.ratio == 1 for s in rank_slowness([(idle[:2], SECOND)], forward=True))


def test_it_takes_some_windows_and_is_said_once() -> None:
    detector = StragglerDetector(SETTINGS, forward=True)
    slow, well = [0.1, 0.3, 0.1], [0.1, 0.1, 0.1]
    assert feed(detector, SLOW_WINDOWS * SETTINGS.window - 1, slow) == []
    (said,) = feed(detector, 1, slow)
    assert (said.rank, said.doing, round(said.ratio)) == (1, "compute", 3)
    assert feed(detector, 10 * SETTINGS.window, slow) == []
    assert feed(detector, SETTINGS.window, well) == []
    assert len(feed(detector, 10 * SETTINGS.window, slow)) == 1


def test_a_single_slow_window_says_nothing() -> None:
    detector = StragglerDetector(SETTINGS, forward=True)
    for _ in range(5):
        assert feed(detector, (SLOW_WINDOWS - 1) * SETTINGS.window, [0.1, 9.0, 0.1]) == []
        assert feed(detector, SETTINGS.window, [0.1, 0.1, 0.1]) == []


def test_forward_passes_that_wait_for_others_say_nothing() -> None:
    detector = StragglerDetector(SETTINGS, forward=False)
    assert feed(detector, 40, [0.1, 0.9, 0.1]) == []
    assert feed(detector, 40, [0.1, 0.1, 0.1], [0.0, 0.6, 0.0])[0].doing == "data"


@pytest.mark.parametrize(
    ("every", "zero", "interval"),
    [
        ("auto", 0, 100),
        ("auto", 1, 1),
        ("auto", 2, 1),
        ("auto", 3, None),
        (7, 0, 7),
        (7, 2, 7),
        (7, 3, None),
        (None, 1, None),
    ],
)
def test_how_often_weights_are_compared(every: object, zero: int, interval: int | None) -> None:
    assert WeightCheck.model_validate({"every": every}).interval(zero) == interval


def test_one_rank_has_nobody_to_be_slower_than() -> None:
    assert feed(StragglerDetector(SETTINGS, forward=True), 40, [0.1]) == []
