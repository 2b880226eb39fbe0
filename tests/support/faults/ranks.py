"""A real training, disturbed again and again: random faults from the matrix, one a cycle, on its ranks and its files.

Ranks are those of `run_group`, without Ray, so that a hundred starts take minutes. Nothing is mocked: processes die by
signals, files are damaged on disk, and an S3 server answers through a proxy that breaks connections.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed, list_folders
from data_service.store.base import Store
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import Ended, run_group
from tests.support.stores.fault_proxy import Fault as StoreFault
from tests.support.stores.fault_proxy import FaultProxy

RankFault = Literal["killed", "killed at any moment", "all killed", "bit flipped", "stopped"]
Fault = RankFault | Literal["checkpoint damaged", "store failing"]
RANK_FAULTS: tuple[RankFault, ...] = (
    "killed", "killed at any moment", "all killed", "bit flipped", "stopped",
)  # fmt: skip
STORE_FAULTS: tuple[StoreFault, ...] = (
    "error 500",
    "slow down",
    "reset",
    "reset after",
    "truncate",
    "garble",
)
_FURTHEST, _LATEST_S = 7, 6.0  # steps after the last commit; seconds after the start


@dataclass
class Chaos:
    """The cycles so far.

    Attributes:
        faults: how often each was tried.
        fired: how many of them struck before their cycle ended by itself.
        damaged: checkpoints that must not be resumed from.
    """

    run: str
    world: int
    draws: random.Random
    proxy: FaultProxy | None = None
    faults: Counter[Fault] = field(default_factory=Counter)
    fired: int = 0
    damaged: set[CheckpointName] = field(default_factory=set)

    def cycle(self) -> None:
        """One start of the run, and one fault. Fails where ranks end otherwise than the fault explains, or go on from
        another checkpoint than the newest good one."""
        store = open_run(self.run).store
        fault = self._draw(store)
        self.faults[fault] += 1
        if fault == "checkpoint damaged":
            damage(store, self.draws, self.damaged)
        if fault == "store failing":
            assert self.proxy is not None
            self.proxy.plan.extend(self.draws.choices(STORE_FAULTS, k=self.draws.randint(1, 4)))
        good = [mark for mark in list_committed(store) if mark not in self.damaged]
        begin = good[0].step if good else 0
        ended = run_group(self.run, self.world, **self._orders(fault, begin))
        self._judge(fault, begin, ended, store)

    def _draw(self, store: Store) -> Fault:
        choices: list[Fault] = [*RANK_FAULTS]
        if self.proxy is not None:
            choices += ["store failing"] * 3
        if len([mark for mark in list_committed(store) if mark not in self.damaged]) >= 2:
            choices += ["checkpoint damaged"]
        return self.draws.choice(choices)

    def _orders(self, fault: Fault, begin: int) -> dict[str, Any]:
        """What `run_group` is told: the fault, and where the cycle ends by itself."""
        rank = self.draws.randrange(self.world)
        step = begin + self.draws.randint(1, _FURTHEST)
        orders: dict[str, Any] = {"stop_at": begin + _FURTHEST + 1}
        match fault:
            case "killed":
                orders["kill"] = {rank: step}
            case "all killed":
                orders["kill"] = dict.fromkeys(range(self.world), step)
            case "killed at any moment":
                orders["kill_after"] = (rank, self.draws.uniform(0, _LATEST_S))
            case "bit flipped":
                orders["flip"] = (rank, step)
            case "stopped":
                orders["stop_at"] = step
        return orders

    def _judge(self, fault: Fault, begin: int, ended: Ended, store: Store) -> None:
        if fault in ("stopped", "checkpoint damaged", "store failing"):
            assert ended.codes == [0] * self.world, (fault, ended)
            self.fired += 1
        elif ended.codes != [0] * self.world:  # a moment may come after the end, or while some have ended
            assert 0 not in ended.codes or fault == "killed at any moment", (fault, ended)
            self.fired += 1
        else:
            assert fault == "killed at any moment", (fault, ended)
        if fault != "killed at any moment":  # that may come before the start is on record
            begins = [e for e in read_history(store).events if e["kind"] in ("start", "resume")]
            assert begins[-1]["step"] == begin, (fault, begin, begins[-1])


def damage(store: Store, draws: random.Random, damaged: set[CheckpointName]) -> None:
    """Of the newest checkpoint that is not `damaged`, one file or its manifest: gone, shorter, or one bit another.
    It is then."""
    newest = next(mark for mark in list_committed(store) if mark not in damaged)
    keys = next(folder for folder in list_folders(store) if folder.name == newest).sizes
    key = draws.choice(sorted(keys))
    data = bytearray(store.get(key))
    how = draws.choice(("gone", "shorter", "flipped"))
    place = draws.randrange(len(data))
    if how == "gone":
        store.delete(key)
    elif how == "shorter":
        store.put(key, bytes(data[:place]))
    else:
        data[place] ^= 1 << draws.randrange(8)
        store.put(key, bytes(data))
    damaged.add(newest)
