"""A driver's control loop in a cluster of nodes of our own, whose ranks do what a test says."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints.attempt import Owner, claim
from data_service.store.base import Store
from data_service.store.local import LocalStore
from launcher.runtime.cluster.control_loop import ControlLoop
from launcher.runtime.cluster.nodes import nodes_except
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.cluster.orders import (
    FinishedTraining,
    JoinedGroup,
    RankError,
    RankNews,
    RankOrders,
    RankOutcome,
    RankResult,
)
from launcher.runtime.cluster.run_claim import RunClaim
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.policies.failures import Failure, FailureKind
from launcher.runtime.policies.recovery import Recovery
from launcher.runtime.policies.watchdog import RankHeartbeat, RankLocation, Watchdog
from launcher.runtime.run.history import read_history

ELASTIC = Sizing(least=1, most=3, expected=3, wait=0, grow=0, each={"CPU": 1})
FIXED = Sizing(least=2, most=2, expected=2, wait=0, grow=float("inf"), each={"CPU": 1})
STEPS = 100
WATCHDOG = Watchdog(step=100, other=500, silence=5)


class Cluster:
    """Nodes by name, and their cores."""

    def __init__(self, **cores: int) -> None:
        self.cores = cores
        self.draining: dict[str, int] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": f"host-{name}", "Alive": True, "Resources": {"CPU": cores}}
            for name, cores in self.cores.items()
        ]


class Display:
    """Keeps what the operator is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.records: list[Mapping[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def record(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def show_activity(self, doing: str) -> None: ...


class Ranks:
    """Stands for a `RankGroup`. `answers`: the news that the next talk brings."""

    def __init__(self, count: int = 0) -> None:
        self.orders = RankOrders()
        self.ends = {rank: RankResult(JoinedGroup(), stays=True) for rank in range(count)}
        self.answers: list[tuple[int, RankNews]] = []
        self.talks, self.done, self.failed, self.started_ranks = 0, False, list[int](), count

    def talk(self) -> list[tuple[int, RankNews]]:
        self.talks += 1
        found, self.answers = self.answers, []
        return found


class _Waits(Exception):
    """The loop would sleep until machines come."""


class Driver:
    """A control loop, and what it has said and recorded."""

    def __init__(self, store: Store, sizing: Sizing, last: int | None = None, failures: Sequence[Failure] = ()) -> None:
        owner = Owner.for_this_process(time.time())
        recipe = SimpleNamespace(total_steps=STEPS, watchdog=WATCHDOG, recovery=Recovery())
        run: Any = SimpleNamespace(store=store, recipe=recipe)
        self.store, self.display = store, Display()
        self.log, self.stopping = OperatorLog(store, self.display.note), StopRequests(self.display.note)
        self.claim = RunClaim(claim(store, owner=owner), owner)
        parts: Any = {"display": self.display, "log": self.log, "stopping": self.stopping}
        self.loop = ControlLoop(run, self.claim, sizing, last, failures, **parts)
        if failures:
            self.loop.apply_failure_policy(nodes_except(()))
        self.ranks: Any = Ranks()
        self.told = 0

    def next_group(self) -> GroupStart | None:
        """How a group may start now; None if none may now, or ever."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", _wait)
            try:
                return self.loop.next_group()
            except _Waits:
                return None

    def begin(self, *nodes: str) -> int:
        """A group joins on these nodes, gets its attempt and trains."""
        self.ranks = Ranks(len(nodes))
        assert self.loop.claim_attempt(self.ranks)
        for rank, node in enumerate(nodes):
            self.take_rank_news(rank, node)
        attempt = self.loop.group.attempt
        assert attempt is not None
        return attempt

    def take_rank_news(self, rank: int, node: str, step: int = 7, doing: str = "training", **more: Any) -> None:
        place, self.told = RankLocation(node, 100 + rank, f"host-{node}"), self.told + 1
        self.loop.take_rank_news(rank, RankNews(RankHeartbeat(self.told, step, doing, 0, place), **more))

    def worked(self) -> None:
        """A step is done."""
        self.take_rank_news(0, self.loop.group.beats[0].place.node, records=[{"kind": "step", "step": 6}])

    def orders(self) -> RankOrders:
        """What the ranks are told in the loop's next turn."""
        self.loop.supervise_group(self.ranks)
        orders: RankOrders = self.ranks.orders
        return orders

    def end(self, *failed: int, **outcomes: RankOutcome) -> None:
        """The group ends. `failed`: the ranks that ended it; `outcomes`: those of ranks that returned, as `rank0`."""
        ends = {int(name.removeprefix("rank")): RankResult(one, False) for name, one in outcomes.items()}
        self.loop.handle_group_end(ends, failed)

    def finish(self, step: int, *, saved: bool = True) -> None:
        self.end(rank0=FinishedTraining(step, saved))

    def close(self) -> bool:
        self.claim.close(0.5)
        return self.log.close(10)

    def events(self) -> list[tuple[Any, ...]]:
        assert self.close()
        found = read_history(self.store).events
        return [(e["kind"], e.get("from"), e.get("to")) for e in found if e["kind"] in ("world", "pause")]


def raised(text: str, kind: FailureKind = "raised", **more: Any) -> RankError:
    return RankError(text, kind, **more)


def _wait(seconds: float) -> None:
    raise _Waits


def driver(folder: Path, sizing: Sizing, last: int | None = None, failures: Sequence[Failure] = ()) -> Driver:
    return Driver(LocalStore(folder), sizing, last, failures)


def started(place: Path | Store, *nodes: str, sizing: Sizing = ELASTIC) -> Driver:
    """With a group of ranks that trains on these nodes."""
    loop = Driver(LocalStore(place) if isinstance(place, Path) else place, sizing)
    loop.next_group()
    loop.begin(*nodes)
    return loop
