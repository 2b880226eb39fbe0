"""A command's ranks through machines that come and go, by a clock of our own."""

from typing import Any

from launcher.runtime.cluster.resources import WorldSizeChange, WorldSizeTracker
from launcher.runtime.policies.elastic import Sizing

SIZING = Sizing(least=1, most=12, expected=8, wait=60, grow=1800, each={"GPU": 1})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def machines(count: int) -> list[dict[str, Any]]:
    return [{"NodeID": str(i), "Alive": True, "Resources": {"GPU": 4}} for i in range(count)]


def roster(last: int | None = None) -> tuple[WorldSizeTracker, Clock]:
    clock = Clock()
    return WorldSizeTracker(SIZING, last, clock), clock


def test_a_machine_is_lost_and_comes_back() -> None:
    ranks, clock = roster()
    assert ranks.ranks_to_start(machines(2)) == 8
    assert ranks.record_world_size(8) is None
    clock.now += 5000
    assert ranks.ranks_to_start(machines(1)) is None
    clock.now += 59
    assert ranks.ranks_to_start(machines(1)) is None
    clock.now += 1
    assert ranks.ranks_to_start(machines(1)) == 4
    assert ranks.record_world_size(4) == WorldSizeChange(8, 4, "no place for 8 ranks within 60 s")
    clock.now += 10
    assert ranks.ranks_to_start(machines(1)) == 4, "a death among them is nothing to wait for"
    assert ranks.record_world_size(4) is None

    clock.now += 100
    assert not ranks.should_grow(machines(2))
    clock.now += 1700
    assert ranks.should_grow(machines(2))
    assert ranks.ranks_to_start(machines(2)) == 8
    assert ranks.record_world_size(8) == WorldSizeChange(4, 8, "the cluster has places for 8 ranks")


def test_the_first_group_waits_for_what_is_expected() -> None:
    ranks, clock = roster()
    assert ranks.ranks_to_start(machines(1)) is None
    clock.now += 30
    assert ranks.ranks_to_start(machines(3)) == 12, "all that there are"
    assert ranks.record_world_size(12) is None


def test_and_for_as_many_as_wrote_the_checkpoint() -> None:
    ranks, clock = roster(last=12)
    assert ranks.ranks_to_start(machines(2)) is None
    clock.now += 60
    assert ranks.ranks_to_start(machines(2)) == 8
    assert ranks.record_world_size(8) == WorldSizeChange(12, 8, "the command was started again")


def test_and_when_ray_finds_no_room() -> None:
    ranks, clock = roster()
    assert ranks.ranks_to_start(machines(2)) == 8
    assert ranks.start_message() == "starting 8 ranks"
    clock.now += 10
    assert ranks.ranks_to_start(machines(2)) == 8
    assert (
        ranks.start_message() == "Ray could not start 8 ranks: a node has just left the cluster, or other jobs fill it"
    )
    ranks.record_world_size(8)
    assert ranks.ranks_to_start(machines(2)) == 8
    assert ranks.start_message() == "starting 8 ranks"
    assert ranks.start_message() is None, "once"


def test_machines_that_come_and_go_do_not_disturb() -> None:
    ranks, clock = roster()
    assert ranks.ranks_to_start(machines(2)) == 8
    ranks.record_world_size(8)
    clock.now += 5000
    for count in (3, 2, 3, 2, 3):
        assert not ranks.should_grow(machines(count))
        clock.now += 59
    clock.now += 1
    assert ranks.should_grow(machines(3))


def test_the_operator_is_told_now_and_then() -> None:
    ranks, clock = roster()
    assert ranks.ranks_to_start(machines(1)) is None
    assert ranks.start_message() == "waiting for machines: places for 4 ranks, 8 wanted"
    clock.now += 30
    assert ranks.ranks_to_start(machines(0)) is None
    assert ranks.start_message() is None
    clock.now += 31
    assert ranks.ranks_to_start(machines(0)) is None
    assert ranks.start_message() == "waiting for machines: places for 0 ranks, 1 at least wanted"
