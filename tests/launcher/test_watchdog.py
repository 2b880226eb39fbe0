"""The watchdog's judgement: who is stuck, given who said what and when."""

import threading

import pytest

from launcher.watchdog import Beat, Place, Watchdog, stack_of_every_thread, stuck

LIMITS = Watchdog(step=100, other=500, silence=30)
HERE, ELSEWHERE = Place("n1", 10), Place("n2", 10)


def beat(doing: str = "training", *, step: int = 7, since: float = 0, heard: float = 0) -> Beat:
    return Beat(step, doing, 1000 - since, 1000 - heard, HERE)


def test_all_is_well_within_the_limits() -> None:
    beats = {0: beat(since=100), 1: beat("loading", since=500), 2: beat(heard=30)}
    assert stuck(beats, 1000, LIMITS) == []
    assert stuck({}, 1000, LIMITS) == []


@pytest.mark.parametrize(
    ("beat", "said"),
    [
        (beat(since=101), "rank 3 has made no progress for 101 s, training at step 7"),
        (beat("loading", step=0, since=501), "rank 3 has made no progress for 501 s, loading at step 0"),
        (beat(since=40, heard=31), "rank 3 has been silent for 31 s, last training at step 7"),
    ],
)
def test_who_is_stuck_is_named(beat: Beat, said: str) -> None:
    assert stuck({0: Beat(7, "training", 999, 999, HERE), 3: beat}, 1000, LIMITS) == [said]


def test_the_rank_furthest_behind_comes_first() -> None:
    beats = {0: beat(step=8, since=200), 1: beat(step=7, since=200), 2: beat(step=8, since=200)}
    assert [line.split()[1] for line in stuck(beats, 1000, LIMITS)] == ["1", "0", "2"]


def test_time_counts_from_the_last_progress() -> None:
    first = Beat(7, "training", 900, 900, HERE)
    assert first.again(7, "training", 950) == Beat(7, "training", 900, 950, HERE)
    assert first.again(8, "training", 950) == Beat(8, "training", 950, 950, HERE)
    assert first.again(7, "saving", 950) == Beat(7, "saving", 950, 950, HERE)


def test_stacks_show_what_a_waiting_thread_does() -> None:
    ready, go_on = threading.Event(), threading.Event()

    def wait_for_a_collective() -> None:
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=wait_for_a_collective, name="waiting")
    thread.start()
    ready.wait()
    try:
        text = stack_of_every_thread()
    finally:
        go_on.set()
        thread.join()
    assert "thread waiting" in text
    assert "wait_for_a_collective" in text
    assert "thread MainThread" in text
