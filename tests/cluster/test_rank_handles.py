"""The driver's handles of processes of a real Ray: orders are pushed while the ranks compute, an outcome is the return
of a call, the death of one frees the others, and the death of the driver ends all."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from launcher.runtime.cluster.orders import FinishedTraining, RankError, RankNews, RankOrders, RankResult
from launcher.runtime.cluster.rank_group import RankGroup
from launcher.runtime.cluster.rank_process import CONCURRENCY_GROUPS
from launcher.runtime.policies.elastic import GroupStart
from launcher.runtime.policies.watchdog import RankHeartbeat, RankLocation

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class StandIn:
    """A rank that waits for the others until it is stopped or freed, and does not train."""

    def __init__(self) -> None:
        self._stopped, self._freed = threading.Event(), threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def train(self, attempt: int) -> RankResult:
        while not self._stopped.wait(0.01):
            if self._freed.is_set():
                return RankResult(RankError("RuntimeError: connection closed by peer", "silent"), stays=True)
        return RankResult(FinishedTraining(attempt), stays=True)

    @ray.method(concurrency_group="talks")
    def talk(self, group: int, orders: RankOrders) -> RankNews:
        if orders.stop:
            self._stopped.set()
        if orders.abort:
            self._freed.set()
        return RankNews(RankHeartbeat(1, group, "training", 0, RankLocation("node", os.getpid())))


class Pool:
    """Takes processes back. `stay`: which can train again."""

    def release(self, stay: dict[int, bool]) -> None:
        self.stay = stay


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the stand-ins
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def started(count: int) -> tuple[RankGroup, Pool, list[int]]:
    """A group of stand-ins that has joined, its pool, and the ranks' processes."""
    actors = [ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(StandIn).remote() for _ in range(count)]
    pool: Any = Pool()
    group = RankGroup(GroupStart(count, frozenset(), number=7), pool)
    places: Any = [SimpleNamespace(actor=actor) for actor in actors]
    group._places = places
    return group, pool, ray.get([actor.pid.remote() for actor in actors])


def follow(group: RankGroup, each: Callable[[int], None]) -> dict[int, RankNews]:
    """Have the group train until it ends; `each` gets the number of the turn. Returns the last news."""
    news: dict[int, RankNews] = {}
    for turn, _ in enumerate(group.train(3, 0.05)):
        each(turn)
        news |= dict(group.talk())
    return news | dict(group.last_news())


def test_a_request_to_stop_is_pushed_and_the_outcome_is_the_return_of_the_call() -> None:
    group, pool, _ = started(2)

    def stop(turn: int) -> None:
        if turn == 5:
            group.orders = RankOrders(stop=True)

    with group:
        news = follow(group, stop)
    assert {rank: end.outcome for rank, end in group.ends.items()} == {
        0: FinishedTraining(3),
        1: FinishedTraining(3),
    }
    assert (group.failed, pool.stay) == ([], {0: True, 1: True})
    assert {rank: one.beat.step for rank, one in news.items()} == {0: 7, 1: 7}


def test_the_others_are_freed_when_a_rank_dies_and_stay() -> None:
    group, pool, pids = started(3)

    def kill(turn: int) -> None:
        if turn == 5:
            os.kill(pids[1], signal.SIGKILL)

    with group:
        follow(group, kill)
    assert group.failed == [1]
    assert {rank for rank, end in group.ends.items() if isinstance(end.outcome, RankError)} == {0, 2}
    assert pool.stay == {0: True, 2: True, 1: False}


def test_a_frozen_rank_answers_nothing_and_holds_up_nobody() -> None:
    group, _, pids = started(2)
    heard: list[int] = []

    def freeze(turn: int) -> None:
        if turn == 5:
            os.kill(pids[0], signal.SIGSTOP)
        heard.extend(rank for rank, _ in group.talk())
        if heard[-20:].count(1) == 20 and psutil.pid_exists(pids[0]):
            psutil.Process(pids[0]).kill()

    with group:
        follow(group, freeze)
    assert heard.count(0) > 0
    assert group.failed == [0]


DRIVER = """
import ctypes, os, signal, sys, threading, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
class Busy:
    def pid(self): return os.getpid()
    def compute(self): ctypes.CDLL(None).sleep(300)
    def hold_python(self): ctypes.PyDLL(None).sleep(300)
    def stop(self): os.kill(os.getpid(), signal.SIGSTOP)
actors = [ray.remote(num_cpus=0, concurrency_groups={"talks": 1})(Busy).remote() for _ in range(3)]
print(*ray.get([actor.pid.remote() for actor in actors]), flush=True)
calls = actors[0].compute.remote(), actors[1].hold_python.remote(), actors[2].stop.remote()
threading.Event().wait()
"""
GONE_S = 60.0


def test_ranks_end_with_their_driver_whatever_they_compute() -> None:
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 3
    driver.kill()
    deadline, tick = time.monotonic() + GONE_S, threading.Event()
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline
        tick.wait(0.05)
    driver.wait()
