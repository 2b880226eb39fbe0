"""A real training, disturbed again and again: random faults from the matrix, one a cycle, on its ranks and its files.

Ranks are processes without Ray, on gloo and an in-process stream, forked (`forked`), so that a hundred starts take
minutes. Nothing is mocked: processes die by signals, files are damaged on disk, and an S3
server answers through a proxy that breaks connections.
"""

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from checkpoints.attempt import Attempt, claim
from checkpoints.gloo_peers import GlooPeers
from checkpoints.layout import CheckpointName
from checkpoints.listing import committed, folders
from data_service.store.base import Store
from encoder_core.train.exchange import Control
from launcher.runtime.rank.main import run_rank
from launcher.runtime.rank.startup import Startup
from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run
from tests.support.data.synthetic import InProcess
from tests.support.ranks.forked import CONTEXT, forked
from tests.support.ranks.run_group import flip_a_bit
from tests.support.stores.fault_proxy import Fault as StoreFault
from tests.support.stores.fault_proxy import FaultProxy

RankFault = Literal[
    "killed", "killed while writing", "all killed", "exception", "frozen", "bit flipped", "stopped"
]
Fault = RankFault | Literal["checkpoint damaged", "store failing"]
RANK_FAULTS: tuple[RankFault, ...] = (
    "killed", "killed while writing", "all killed", "exception", "frozen", "bit flipped", "stopped",
)  # fmt: skip
STORE_FAULTS: tuple[StoreFault, ...] = (
    "error 500",
    "slow down",
    "reset",
    "reset after",
    "truncate",
    "garble",
)
_CHANGES = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir")
_FURTHEST, _MOST_CHANGES = 7, 90  # steps after the last commit; changes to the file system until then


class Disturbed(Exception):
    """What a rank raises when it is told to."""


@dataclass(frozen=True)
class Orders:
    """What befalls one rank: `fault` at the beginning of `step`, or before its `change`-th change to a file."""

    run: str
    rank: int
    world: int
    meeting: str
    fault: RankFault | None
    step: int
    change: int
    stop_at: int


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
        good = [mark for mark in committed(store) if mark not in self.damaged]
        begin = good[0].step if good else 0
        ended = self._group(fault, begin)
        self._judge(fault, begin, ended, store)

    def finish(self) -> None:
        """Let the run end."""
        ended = start_group(self.run, self.world, [None] * self.world, 0, 0, stop_at=-1)
        assert ended.codes == [0] * self.world, ended

    def _draw(self, store: Store) -> Fault:
        choices: list[Fault] = [*RANK_FAULTS]
        if self.proxy is not None:
            choices.remove("killed while writing")  # it counts changes to local files
            choices += ["store failing"] * 3
        if len([mark for mark in committed(store) if mark not in self.damaged]) >= 2:
            choices += ["checkpoint damaged"]
        return self.draws.choice(choices)

    def _group(self, fault: Fault, begin: int) -> "Ended":
        faults: list[RankFault | None] = [None] * self.world
        for one in RANK_FAULTS:
            if fault == one:
                faults[self.draws.randrange(self.world)] = one
        if fault in ("all killed", "stopped"):
            faults = [faults[0] or next(filter(None, faults))] * self.world
        step = begin + self.draws.randint(1, _FURTHEST)  # a rank tells of the steps that are done
        change = self.draws.randint(1, _MOST_CHANGES)
        return start_group(self.run, self.world, faults, step, change, stop_at=begin + _FURTHEST + 1)

    def _judge(self, fault: Fault, begin: int, ended: "Ended", store: Store) -> None:
        if fault in ("stopped", "checkpoint damaged", "store failing"):
            assert ended.codes == [0] * self.world, (fault, ended)
            self.fired += 1
        elif ended.codes != [0] * self.world:  # where a write was not reached, the cycle ended by itself
            assert 0 not in ended.codes, (fault, ended)
            self.fired += 1
        else:
            assert fault == "killed while writing", (fault, ended)
        begins = [e for e in read_history(store).events if e["kind"] in ("start", "resume")]
        assert begins[-1]["step"] == begin, (fault, begin, begins[-1])


def damage(store: Store, draws: random.Random, damaged: set[CheckpointName]) -> None:
    """Of the newest checkpoint that is not `damaged`, one file or its manifest: gone, shorter, or one bit another.
    It is then."""
    newest = next(mark for mark in committed(store) if mark not in damaged)
    keys = next(folder for folder in folders(store) if folder.mark == newest).sizes
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


@dataclass(frozen=True)
class Ended:
    """Exit codes in rank order; negative for signals."""

    codes: list[int]
    output: str


def start_group(
    run: str, world: int, faults: Sequence[RankFault | None], step: int, change: int, *, stop_at: int
) -> Ended:
    """A new attempt of `run` on `world` ranks, each with its fault, until all have ended. The run stops by itself at
    step `stop_at`. A frozen rank takes the others with it, as a watchdog would see to."""
    with tempfile.TemporaryDirectory() as meeting:
        orders = [
            Orders(run, rank, world, meeting, fault, step, change, stop_at)
            for rank, fault in enumerate(faults)
        ]
        here, there = CONTEXT.Pipe()
        logs = [Path(meeting, f"rank{rank}.log") for rank in range(world)]
        ranks = [forked(_rank, order, there, output=log) for order, log in zip(orders, logs, strict=True)]
        for rank in ranks:
            rank.start()
        waiting: list[Any] = [here, *(rank.sentinel for rank in ranks)]
        while len(waiting) > 1:
            for ready in wait(waiting):
                waiting.remove(ready)
                if ready is here:
                    for rank in ranks:
                        rank.kill()
        for rank in ranks:
            rank.join()
        output = "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
    return Ended([rank.exitcode or 0 for rank in ranks], output)


class ChaosLink:
    """A rank's line to nobody, which tells it what befalls it."""

    ends = None

    def __init__(self, orders: Orders, frozen: Connection) -> None:
        self._orders, self._frozen, self._step, self._stop = orders, frozen, -1, False

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        new, self._step = step != self._step, step
        if doing != "training" or not new:
            return
        if self._orders.fault == "killed while writing":
            _die_writing(self._orders.change)
        elif self._orders.fault is not None and step == self._orders.step:
            self._strike(self._orders.fault)

    def _strike(self, fault: RankFault) -> None:
        if fault in ("killed", "all killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exception":
            raise Disturbed(f"at step {self._step}")
        if fault == "frozen":
            self._frozen.send(self._orders.rank)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "bit flipped":
            flip_a_bit()
        if fault == "stopped":
            self._stop = True

    def record(self, record: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        print(kind, fields, flush=True)

    def stop_requested(self) -> bool:
        return self._stop or self._step == self._orders.stop_at


def _die_writing(change: int) -> None:
    """SIGKILL right before this process's `change`-th change to the file system from here on, in whatever thread."""
    left = [change]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        call.__name__ = "counted"
        return call

    for name in _CHANGES:
        if getattr(os, name).__name__ != "counted":  # the beat comes at every step
            setattr(os, name, counted(getattr(os, name)))


def _rank(orders: Orders, frozen: Connection) -> None:
    place = {"RANK": orders.rank, "LOCAL_RANK": orders.rank, "WORLD_SIZE": orders.world}  # DeepSpeed insists
    os.environ |= {name: str(value) for name, value in place.items()}
    dist.init_process_group(
        "gloo", init_method=f"file://{orders.meeting}/meet", rank=orders.rank, world_size=orders.world
    )
    control, peers = Control.join(), GlooPeers(dist.new_group(backend="gloo"))
    run = open_run(orders.run)
    claimed = claim(run.store).number if orders.rank == 0 else None
    number = peers.all_gather(claimed)[0]
    assert isinstance(number, int)
    run_rank(run, Attempt(run.store, number), control, peers, InProcess, ChaosLink(orders, frozen), Startup())
    dist.destroy_process_group()
