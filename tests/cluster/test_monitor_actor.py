"""The coordinator as the Ray actor that it is: with a store that hangs, with a rank that is frozen, and killed."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from checkpoints.attempt import Owner, claim
from launcher.runtime.cluster.coordinator import start_coordinator
from launcher.runtime.cluster.rank_link import RayLink, here
from launcher.runtime.cluster.stuck_ranks import StuckRankKiller
from launcher.runtime.policies.elastic import Sizing
from launcher.runtime.policies.watchdog import RankLocation, Watchdog
from launcher.runtime.run.history import read_history
from tests.support.stores.faulty import FaultyStore, set_fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ONE = Sizing(least=1, most=1, expected=1, wait=0, grow=float("inf"), each={"CPU": 1})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the stores and ranks of this test
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


class Rank:
    """A process of Ray that only beats."""

    def live(self, coordinator: Any, attempt: int) -> RankLocation:
        self._link = RayLink(coordinator, 0, save_multiple=1)
        self._link.attempt = attempt
        self._link.beat(7, "training")
        return here()

    def stop_requested(self) -> bool:
        return self._link.stop_requested()


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(tmp_path / "run")


def coordinating(store: FaultyStore) -> Any:
    owner = Owner.here(time.time())
    return start_coordinator(claim(store, owner=owner), owner, ONE, None)


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_frozen_rank_is_killed_though_the_store_hangs(store: FaultyStore) -> None:
    """A6, A7: what is to be recorded waits; the claim, the beats, the driver's look, and the kill do not."""
    coordinator = coordinating(store)
    ray.get(coordinator.next_group.remote([]))
    assert ray.get(coordinator.enter.remote(["n"])) == 1
    rank = ray.remote(num_cpus=0)(Rank).remote()
    place = ray.get(rank.live.remote(coordinator, 1))
    until(lambda: ray.get(coordinator.status.remote()).beats)
    set_fault(store, "hangs")
    notes: list[str] = []
    run: Any = SimpleNamespace(recipe=SimpleNamespace(watchdog=Watchdog(silence=2)))
    guard = StuckRankKiller(run, coordinator, notes.append)
    os.kill(place.pid, signal.SIGSTOP)

    def looked() -> bool:
        guard.check(ray.get(coordinator.status.remote(), timeout=10))
        return not psutil.pid_exists(place.pid)

    until(looked)
    assert "rank 0 " in notes[0]
    ray.get(coordinator.next_group.remote([0]), timeout=10)
    claiming = coordinator.enter.remote(["n"])
    for step in range(20):
        ray.get(coordinator.beat.remote(0, step, "starting", RankLocation("n", 1)), timeout=10)
    assert ray.wait([claiming], timeout=0)[0] == [], "the claim waits for the store"
    set_fault(store, None)
    assert ray.get(claiming, timeout=60) == 2
    assert ray.get(coordinator.close.remote(60))
    kinds = [event["kind"] for event in read_history(store).events]
    assert kinds.count("hang") == kinds.count("death") == 1
    ray.kill(coordinator)


@pytest.mark.long
def test_a_rank_ends_when_its_coordinator_is_killed(store: FaultyStore) -> None:
    coordinator = coordinating(store)
    rank = ray.remote(num_cpus=0)(Rank).remote()
    ray.get(rank.live.remote(coordinator, 1))
    until(lambda: ray.get(coordinator.status.remote()).beats)
    assert not ray.get(rank.stop_requested.remote())
    ray.kill(coordinator)

    def lost() -> bool:
        try:
            return bool(ray.get(rank.stop_requested.remote(), timeout=10))
        except ray.exceptions.RayTaskError as error:
            return "CoordinatorLost" in str(error)

    until(lost)
    again = coordinating(store)
    assert ray.get(again.enter.remote(["n"])) == 2, "another coordinator, another attempt"
    ray.kill(again)
    ray.kill(rank)
