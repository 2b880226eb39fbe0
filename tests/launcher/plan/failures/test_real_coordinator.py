"""Simulated months in which a real coordinator decides beside the simulation, for ranks that only answer: at every
start, death, drained node and look for room, both must decide the same."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from checkpoints.attempt import Owner, claim
from data_service.store.local import LocalStore
from launcher.plan.failures.faults import Fault, Outage, draw_faults, draw_outages
from launcher.plan.failures.month import Month, Setting, Simulation, simulate
from launcher.plan.failures.recovery import Copies, Way
from launcher.runtime.capacity.devices import Cluster, find_gpu
from launcher.runtime.cluster import coordinator as coordinators
from launcher.runtime.cluster import nodes
from launcher.runtime.cluster.coordinator import Coordinator
from launcher.runtime.cluster.world_size import WorldSizeTracker
from launcher.runtime.policies.elastic import Sizing
from launcher.runtime.policies.failures import Failure
from launcher.runtime.policies.watchdog import RankLocation

DAY = 86400.0
ANEW = Way("all new", (("start", "", 60.0),), cold=20.0, load=10.0)
COPIES = Copies(every=2, stall=0.01, transfer=0.3, bytes=1e9)
STAY = replace(ANEW, stay=(("rebuild", "", 5.0),), recall=0.5, copies=COPIES)


class Beside(Simulation):
    """A simulation that asks a real coordinator whatever it decides, and holds it to the same decision."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.folder, self.failed, self.decided = folder, list[int](), 0
        self.coordinator = self.command(None)
        self.attempt: int | None = None

    def command(self, last: int | None) -> Coordinator:
        owner, store = Owner.here(time.time()), LocalStore(self.folder)
        return Coordinator(claim(store, owner=owner), owner, self.setting.sizing, last)

    def ask(self) -> int | None:
        count = super().ask()
        start = self.coordinator.next_group(self.failed)
        self.failed = []
        assert (None if start is None else start.ranks) == count
        if start is not None:
            assert start.without == self.world.without
        self.decided += 1
        return count

    def place(self, count: int) -> None:
        super().place(count)
        self.attempt = None
        self.beats("starting", 0)

    def enter(self) -> None:
        super().enter()
        entered = self.coordinator.enter([str(node) for node, _ in self.layout.seats()])
        assert isinstance(entered, int)
        self.attempt = entered
        self.beats("loading", self.steps(self.work))
        self.beats("training", self.steps(self.work))

    def beats(self, doing: str, step: int) -> None:
        for rank, (node, place) in enumerate(self.layout.seats()):
            self.coordinator.beat(rank, step, doing, RankLocation(str(node), 1000 + place), self.attempt)

    def has_room(self) -> bool:
        grows = super().has_room()
        self.coordinator.look_around()
        assert self.coordinator.status().paused == grows
        self.decided += 1
        return grows

    def pause(self, notice: Fault | None) -> None:
        if notice is not None:
            self.going = frozenset(str(node) for node in notice.nodes)
            self.coordinator.look_around()
            self.going = frozenset()
            assert self.coordinator.status().paused
        super().pause(notice)
        self.coordinator.finish(self.steps(self.work), self.attempt)

    def die(self, fault: Fault, *, worked: bool) -> None:
        if worked:
            step = {"kind": "step", "step": self.steps(self.work), "loss": 1.0, "seconds": 1.0}
            self.coordinator.record(step, self.attempt)
        lost = self.hit
        self.failed = [rank for rank, seat in enumerate(self.layout.seats()) if seat in lost]
        if fault.kind == "hang":
            self.coordinator.hung("stuck", self.failed, self.coordinator.status().group)
        super().die(fault, worked=worked)

    def goes_on(self, failure: Failure) -> bool:
        going_on = super().goes_on(failure)
        if not going_on:
            assert self.coordinator.next_group(self.failed) is None
            assert self.coordinator.status().fatal is not None
            assert self.coordinator.close(10)
            self.coordinator, self.failed = self.command(self.layout.count), []
        self.decided += 1
        return going_on

    going: frozenset[str] = frozenset()


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    setting: Setting,
    way: Way,
    faults: Sequence[Fault],
    outages: Sequence[Outage],
    wall: float,
    interval: float = 900.0,
) -> tuple[Month, Beside]:
    """Return the month, and the simulation that asked a coordinator."""
    there: list[Beside] = []

    def now() -> float:
        return there[0].now if there else 0.0

    monkeypatch.setattr(coordinators, "WorldSizeTracker", partial(WorldSizeTracker, clock=now))
    monkeypatch.setattr(coordinators, "time", SimpleNamespace(time=now))
    monkeypatch.setattr(ray, "nodes", lambda: listed(there[0]))
    monkeypatch.setattr(nodes, "draining_nodes", lambda: there[0].going)
    there.append(Beside(folder, setting, way, interval, faults, outages, wall))
    month = there[0].run()
    assert there[0].coordinator.close(10)
    return month, there[0]


def listed(simulation: Beside) -> Any:
    """Every node by itself, as Ray lists them."""
    return simulation.machines.listing(range(simulation.setting.nodes))


def setting(count: int, ranks: int) -> Setting:
    sizing = Sizing(1, ranks, ranks, wait=60.0, grow=1800.0, each={"CPU": 0.25, "GPU": 1.0})
    return Setting(count, 8, sizing, 4 * count * 8, 0.1, 0.2, blocked=1.0, behind=5.0, hang=600.0)


def compare(
    monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, *, days: float, nodes: int, hours: float
) -> tuple[Month, Beside]:
    """Hold both ways of a month to the coordinator's decisions; return the second. `hours`: that a node lasts."""
    cluster = Cluster(nodes, 8, find_gpu("H100"), mtbf=hours * 3600)
    faults, outages = draw_faults(cluster, seed, days * DAY), draw_outages(seed, days * DAY)
    of, found = setting(nodes, 8 * nodes), list[tuple[Month, Beside]]()
    for way in (ANEW, STAY):
        found.append(run(monkeypatch, folder / way.name, of, way, faults, outages, days * DAY))
        month, beside = found[-1]
        assert month == simulate(of, way, 900.0, faults, outages, days * DAY)
        assert beside.decided > len(faults)
    return found[-1]


@pytest.mark.long
def test_a_real_coordinator_decides_the_same_for_1024_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    month, _ = compare(monkeypatch, tmp_path, 2, days=30, nodes=128, hours=6335)
    assert month.from_store == 0 < month.stayed <= month.restarts


def test_a_real_coordinator_leaves_out_the_same_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few machines that fail all the time."""
    month, beside = compare(monkeypatch, tmp_path, 1, days=2, nodes=6, hours=24)
    assert month.excluded == len(beside.world.without) > 0


def test_a_real_coordinator_ends_the_run_at_the_same_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No save for days, so there is no newer commit."""
    faults = [Fault(1000.0 * number, "rank", (number % 4,)) for number in range(1, 40)]
    month, _ = run(monkeypatch, tmp_path, setting(4, 32), ANEW, faults, (), DAY, interval=1e6)
    assert month.ended == 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_real_coordinator_decides_the_same_for_16384_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A month with the faults of Llama 3."""
    month, beside = compare(monkeypatch, tmp_path, 3, days=30, nodes=2048, hours=54 * 24 * 2048 / 419)
    assert month.restarts > 300
    assert beside.decided > 700
