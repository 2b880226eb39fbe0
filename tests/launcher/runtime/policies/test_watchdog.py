"""The watchdog's judgement: who is stuck, by what one observer saw on its own clock."""

import random
import threading
from dataclasses import replace

import pytest

from launcher.runtime.policies.watchdog import (
    TRIAL_SUM_ACTIVITIES,
    HeartbeatObserver,
    RankHeartbeat,
    RankLocation,
    StuckRank,
    Watchdog,
    find_culprits,
    stack_of_every_thread,
)

LIMITS = Watchdog(step=100, other=500, silence=30)
WAITING = ((0, 7), (2, 7), (3, 8))
HERE, ELSEWHERE = RankLocation("n1", 10, "one"), RankLocation("n2", 10, "two")


class Watched:
    """Ranks that beat once a second, and an observer who looks four times a second, by a clock of our own."""

    def __init__(self, ranks: int, start: float = 1000.0) -> None:
        self.now = start
        self.observer = HeartbeatObserver(lambda: self.now)
        self.beats = {rank: RankHeartbeat(1, 7, "training", 0, HERE) for rank in range(ranks)}
        self.mute: set[int] = set()
        self.ranks = ranks
        self.observer.observe(self.beats, self.ranks)

    def move(self, rank: int, step: int = 7, doing: str = "training", done: int = 0) -> None:
        self.beats[rank] = replace(self.beats[rank], step=step, doing=doing, done=done)

    def wait(self, seconds: float) -> list[str]:
        """Live on. Returns who is stuck then."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            if self.now % 1 == 0:
                self.sound()
            self.observer.observe(self.beats, self.ranks)
        return [str(stuck) for stuck in self.observer.find_stuck_ranks(LIMITS)]

    def sound(self) -> None:
        for rank, beat in self.beats.items():
            if rank not in self.mute:
                self.beats[rank] = replace(beat, count=beat.count + 1)

    def gap(self, seconds: float, *, ranks_live: bool) -> None:
        """The observer sees nothing for a while."""
        self.now += seconds
        if ranks_live:
            self.sound()


def test_all_is_well_within_the_limits() -> None:
    watched = Watched(2)
    watched.move(1, doing="loading")
    assert watched.wait(100) == []
    watched.mute = {1}
    watched.move(0, step=8)
    assert watched.wait(30) == []
    assert HeartbeatObserver().find_stuck_ranks(LIMITS) == []


@pytest.mark.parametrize("doing", TRIAL_SUM_ACTIVITIES.values())
def test_a_first_sum_may_take_as_long_as_a_step_and_who_never_comes_to_it_is_behind(doing: str) -> None:
    watched = Watched(3)
    for rank in range(3):
        watched.move(rank, step=0, doing="starting" if rank == 1 else doing)
    assert watched.wait(100) == []
    assert watched.wait(1) == [f"rank {rank} has made no progress for 101 s, {doing} at step 0" for rank in (0, 2)]
    assert find_culprits(watched.observer.find_stuck_ranks(LIMITS), watched.beats) == [1]


def test_who_is_stuck_is_named() -> None:
    watched = Watched(4)
    watched.move(1, step=0, doing="loading")
    watched.mute = {2}
    watched.move(3, step=8)
    assert watched.wait(31) == ["rank 2 has been silent for 31 s, last training at step 7"]
    watched.mute = set()
    watched.wait(1)
    assert watched.wait(69) == [
        f"rank {rank} has made no progress for 101 s, training at step {step}" for rank, step in WAITING
    ]
    watched.beats = {1: watched.beats[1]}
    assert watched.wait(400) == ["rank 1 has made no progress for 501 s, loading at step 0"]


def test_a_long_evaluation_or_upload_is_progress_while_something_moves() -> None:
    """A8: the limit counts from the last microbatch or part, not from the beginning."""
    watched = Watched(1)
    for doing in ("evaluating", "saving"):
        for done in range(5):
            watched.move(0, doing=doing, done=done)
            assert watched.wait(499) == []
    assert watched.wait(2) == ["rank 0 has made no progress for 501 s, saving at step 7"]


def test_another_process_begins_anew() -> None:
    watched = Watched(1)
    watched.mute = {0}
    watched.wait(29)
    watched.beats[0] = RankHeartbeat(watched.beats[0].count, 7, "training", 0, ELSEWHERE)
    assert watched.wait(29) == []


@pytest.mark.parametrize("ranks_live", [True, False])
def test_what_nobody_saw_is_nobodys_fault(ranks_live: bool) -> None:
    """The driver was stopped for an hour, twice; or the whole machine."""
    watched = Watched(2)
    watched.wait(20)
    for _ in range(2):
        watched.gap(3600, ranks_live=ranks_live)
        assert watched.wait(2) == []


@pytest.mark.parametrize("seed", range(20))
def test_at_random_the_healthy_are_spared_and_the_dead_are_found(seed: int) -> None:
    """Gaps of any length, ranks that rest for less than the limit; then one falls silent for good."""
    draws = random.Random(seed)
    watched = Watched(4, start=draws.choice([0.0, 1e6]))
    for step in range(8, 68):
        what = draws.choice(["gap", "frozen gap", "rest", "step"])
        if "gap" in what:
            watched.gap(4 ** draws.uniform(0, 7) // 1, ranks_live=what == "gap")
        elif what == "rest":
            watched.mute = set(draws.sample(range(4), draws.randint(1, 4)))
            assert watched.wait(draws.randint(1, 25)) == []
            watched.mute = set()
        for rank in watched.beats:
            watched.move(rank, step=step)
        assert watched.wait(draws.randint(1, 3)) == []
    watched.mute = {2}
    found: list[str] = []
    passed = 0
    while not found and passed < 120:
        watched.gap(draws.choice([0, 0, 50]), ranks_live=True)
        found, passed = watched.wait(1), passed + 1
    assert [line.split()[:2] for line in found] == [["rank", "2"]]
    assert passed <= 32


@pytest.mark.parametrize("seed", range(20))
def test_at_random_ranks_that_never_begin_are_found_and_those_that_begin_late_are_spared(seed: int) -> None:
    """Such as those whose imports hang on a disk that is gone: they never answer, and nobody waits with them."""
    draws = random.Random(seed)
    watched = Watched(draws.randint(1, 5))
    absent = draws.sample(range(watched.ranks), draws.randint(1, watched.ranks))
    late = draws.sample(absent, draws.randint(0, len(absent) - 1))
    begun = {rank: watched.beats.pop(rank) for rank in absent}
    passed = 0
    while passed < 500:
        watched.gap(draws.choice([0, 0, 1000]), ranks_live=True)
        seconds = min(draws.randint(1, 60), 500 - passed)
        for rank in watched.beats:
            watched.move(rank, step=0, doing="loading", done=passed)
        assert watched.wait(seconds - 1) == []  # a gap counts as one more second
        passed += seconds
        if late and passed > 250:
            watched.beats[late.pop()] = begun[0 if 0 in begun else absent[0]]
    never = sorted(set(range(watched.ranks)) - watched.beats.keys())
    for rank in watched.beats:
        watched.move(rank, step=0, doing="loading", done=passed)
    watched.wait(40)
    found = watched.observer.find_stuck_ranks(LIMITS)
    assert [stuck.rank for stuck in found] == never
    assert find_culprits(found, watched.beats) == never


@pytest.mark.parametrize(
    ("silent", "places", "behind"),
    [
        ([], [(7, "training", 0), (7, "training", 0), (7, "training", 0)], []),  # nobody can tell
        ([1], [(7, "training", 0), (7, "training", 0), (7, "training", 0)], [1]),
        ([1, 2], [(7, "training", 0), (8, "training", 0), (7, "training", 0)], [1, 2]),
        ([], [(8, "training", 0), (7, "training", 0), (8, "training", 0)], [1]),
        ([], [(8, "training", 0), (7, "training", 0), (7, "training", 0)], [1, 2]),
        ([], [(8, "evaluating", 4), (8, "evaluating", 4), (8, "evaluating", 3)], [2]),
        ([], [(8, "evaluating", 4), (8, "training", 0), (8, "training", 0)], []),
        ([], [(40, "loading", 3), (0, "starting", 0), (41, "training", 0)], [1]),
        ([], [(40, "loading", 3), (40, "training", 0), (40, "training", 0)], [0]),
    ],
)
def test_whose_fault_a_hang_is(silent: list[int], places: list[tuple[int, str, int]], behind: list[int]) -> None:
    beats = {rank: RankHeartbeat(9, *where, HERE) for rank, where in enumerate(places)}
    found = [StuckRank(rank, rank in silent, "is stuck") for rank in beats if not silent or rank in silent]
    assert find_culprits(found, beats) == behind


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
    assert "waiting" in text
    assert "wait_for_a_collective" in text
    assert "thread MainThread" in text
