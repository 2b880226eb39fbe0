"""The guard: whom it ends, and that nothing but that keeps it from doing so. Ray is three functions here."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from launcher.runtime.cluster import stuck_ranks as guard
from launcher.runtime.cluster.orders import Status
from launcher.runtime.cluster.stuck_ranks import StuckRankKiller
from launcher.runtime.policies.watchdog import Beat, RankLocation, Watchdog

PLACES = [RankLocation("a", 1, "one"), RankLocation("b", 2, "two")]
RUN: Any = SimpleNamespace(recipe=SimpleNamespace(watchdog=Watchdog(step=100, other=500, silence=5)))


class Coordinator:
    """Keeps what it is told; gone, if `alive` is not set."""

    def __init__(self, alive: bool = True) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.alive = alive
        self.stacks = SimpleNamespace(remote=lambda: self._answer({0: "x", 1: "y"}))
        self.hung = SimpleNamespace(remote=self._hung)

    def _hung(self, *what: Any) -> None:
        self._answer(self.told.append(what))

    def _answer(self, answer: Any) -> Any:
        if not self.alive:
            raise ray.exceptions.ActorDiedError
        return answer


class World:
    """Two ranks, of which rank 1 may be frozen, a driver that looks, and a clock."""

    def __init__(self, coordinator: Coordinator, group: int = 1) -> None:
        self.now = 0.0
        self.guard = StuckRankKiller(RUN, coordinator, lambda text: None, lambda: self.now)
        self.count, self.frozen, self.group = 1, False, group

    def status(self, **more: Any) -> Status:
        self.count += 1
        counts = (self.count, 1 if self.frozen else self.count)
        beats = {n: Beat(counts[n], 0, "starting", 0, PLACES[n]) for n in (0, 1)}
        return Status(group=self.group, beats=beats, **more)

    def look(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.guard.check(self.status())


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[list[RankLocation]]:
    found: list[list[RankLocation]] = []
    monkeypatch.setattr(guard, "kill", found.append)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return found


def test_a_rank_that_freezes_before_its_group_is_let_in_is_found(killed: list[list[RankLocation]]) -> None:
    """There is no attempt yet. Once a group."""
    coordinator = Coordinator()
    world = World(coordinator)
    world.look(3)
    world.frozen = True
    world.look(20)
    assert killed == [PLACES]
    ((what, behind, group),) = coordinator.told
    assert (what.split(" for ")[0], behind, group) == ("rank 1 has been silent", [1], 1)
    world.group = 2
    world.look(20)
    assert len(killed) == 2


def test_a_coordinator_that_is_gone_saves_nobody(killed: list[list[RankLocation]]) -> None:
    """A7: first of all, the ranks are ended."""
    world = World(Coordinator(alive=False))
    world.frozen = True
    with pytest.raises(ray.exceptions.ActorDiedError):
        world.look(20)
    assert killed == [PLACES]


def test_a_driver_that_was_stopped_kills_nobody(killed: list[list[RankLocation]]) -> None:
    world = World(Coordinator())
    for _ in range(20):
        world.now += 3600
        world.look(1)
    assert killed == []


def test_ranks_whose_run_was_taken_over_are_ended_at_once(killed: list[list[RankLocation]]) -> None:
    """A15: they do not train on until their next commit."""
    world = World(Coordinator())
    world.guard.check(world.status())
    assert killed == []
    world.guard.check(world.status(superseded=True))
    world.guard.check(world.status(superseded=True))
    assert killed == [PLACES]
