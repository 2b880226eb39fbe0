"""The monitor as the Ray actor that it is: with a store that hangs, with a rank that is frozen, and killed."""

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
from launcher.cluster.coordinator import start_monitor
from launcher.cluster.stuck_ranks import StuckRankKiller
from launcher.cluster.worker import RayLink, here
from launcher.policies.elastic import Sizing
from launcher.policies.watchdog import Place, Watchdog
from launcher.run.history import read_history
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

    def live(self, monitor: Any, attempt: int) -> Place:
        self._link = RayLink(monitor, 0, grid=1)
        self._link.attempt = attempt
        self._link.beat(7, "training")
        return here()

    def stop_requested(self) -> bool:
        return self._link.stop_requested()


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(tmp_path / "run")


def monitoring(store: FaultyStore) -> Any:
    owner = Owner.here(time.time())
    return start_monitor(claim(store, owner=owner), owner, ONE, None)


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_frozen_rank_is_killed_though_the_store_hangs(store: FaultyStore) -> None:
    """A6, A7: what is to be recorded waits; the claim, the beats, the driver's look, and the kill do not."""
    monitor = monitoring(store)
    ray.get(monitor.next_group.remote([]))
    assert ray.get(monitor.enter.remote(["n"])) == 1
    rank = ray.remote(num_cpus=0)(Rank).remote()
    place = ray.get(rank.live.remote(monitor, 1))
    until(lambda: ray.get(monitor.status.remote()).beats)
    set_fault(store, "hangs")
    notes: list[str] = []
    run: Any = SimpleNamespace(recipe=SimpleNamespace(watchdog=Watchdog(silence=2)))
    guard = StuckRankKiller(run, monitor, notes.append)
    os.kill(place.pid, signal.SIGSTOP)

    def looked() -> bool:
        guard.check(ray.get(monitor.status.remote(), timeout=10))
        return not psutil.pid_exists(place.pid)

    until(looked)
    assert "rank 0 has been silent for" in notes[0]
    ray.get(monitor.next_group.remote([0]), timeout=10)
    claiming = monitor.enter.remote(["n"])
    for step in range(20):
        ray.get(monitor.beat.remote(0, step, "starting", Place("n", 1)), timeout=10)
    assert ray.wait([claiming], timeout=0)[0] == [], "the claim waits for the store"
    set_fault(store, None)
    assert ray.get(claiming, timeout=60) == 2
    assert ray.get(monitor.close.remote(60))
    kinds = [event["kind"] for event in read_history(store).events]
    assert kinds.count("hang") == kinds.count("death") == 1
    ray.kill(monitor)


def test_a_rank_ends_when_its_monitor_is_killed(store: FaultyStore) -> None:
    monitor = monitoring(store)
    rank = ray.remote(num_cpus=0)(Rank).remote()
    ray.get(rank.live.remote(monitor, 1))
    until(lambda: ray.get(monitor.status.remote()).beats)
    assert not ray.get(rank.stop_requested.remote())
    ray.kill(monitor)

    def lost() -> bool:
        try:
            return bool(ray.get(rank.stop_requested.remote(), timeout=10))
        except ray.exceptions.RayTaskError as error:
            return "MonitorLost" in str(error)

    until(lost)
    again = monitoring(store)
    assert ray.get(again.enter.remote(["n"])) == 2, "another monitor, another attempt"
    ray.kill(again)
    ray.kill(rank)
