"""Twenty cycles of chaos through the whole command on a real Ray; in the end, the run that nobody disturbed.

Faults are random, one a cycle, from a rank to everything at once. What dies inside is started again by the command.
What ends the command is followed by the same command, as from a scheduler. Nobody mends anything in between.
`infra/test -m long tests/cluster/test_chaos_through_ray.py -rP` prints what happened and the goodput.
"""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import pytest

from checkpoints.layout import CheckpointName
from data_service.store.open import open_store
from launcher.contract import REPEAT
from launcher.observe.inspect.report.figures import measure
from tests.support.faults.ranks import damage
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import (
    await_commit,
    committed,
    descendants,
    freeze,
    kill,
    kill_everything,
    output,
    titled,
    training,
    wait_for,
)

Inside = Literal["rank killed", "all ranks killed", "rank frozen", "feed killed", "data worker killed"]
Ending = Literal["preempted", "command killed", "machine lost", "machine lost, checkpoint damaged"]
Fault = Inside | Ending
INSIDE: tuple[Inside, ...] = (
    "rank killed", "all ranks killed", "rank frozen", "feed killed", "data worker killed",
)  # fmt: skip
ENDING: tuple[Ending, ...] = (
    "preempted",
    "command killed",
    "machine lost",
    "machine lost, checkpoint damaged",
)
_RANK = "ray::RankProcess as rank"
_LATEST_S = 6.0  # after a commit


@dataclass
class RayChaos:
    """The cycles so far.

    Attributes:
        faults: how often each was tried: there may be no data worker to kill.
        starts: how often the command was given.
        damaged: checkpoints that must not be resumed from.
    """

    run: str
    draws: random.Random
    faults: Counter[Fault] = field(default_factory=Counter)
    starts: int = 0
    damaged: set[CheckpointName] = field(default_factory=set)
    _orphans: list[psutil.Process] = field(default_factory=list)

    def cycles(self, count: int) -> int:
        """`count` faults, each after a commit of its own; then a stop. Returns the step that the run stands at."""
        left = self._shuffled(count)
        while left:
            with self._command() as process:
                while left:
                    self._await_commit(process)
                    fault = left.pop()
                    self.faults[fault] += 1
                    if fault in ENDING:
                        self._end(process, fault)
                        break
                    self._strike(process, fault)
        with self._command() as process:
            self._await_commit(process)
            self._end(process, "preempted")
        _, alive = psutil.wait_procs(self._orphans, timeout=60)
        assert not alive, "killed commands leave nothing behind"
        return committed(self.run)

    def _shuffled(self, count: int) -> list[Fault]:
        """Every kind about as often as every other, in random order."""
        kinds: list[Fault] = [*INSIDE, *ENDING]
        self.draws.shuffle(kinds)
        faults = [kinds[index % len(kinds)] for index in range(count)]
        self.draws.shuffle(faults)
        return faults

    @contextmanager
    def _command(self) -> Iterator["subprocess.Popen[str]"]:
        self.starts += 1
        with training(self.run) as process:
            yield process

    def _await_commit(self, process: "subprocess.Popen[str]") -> None:
        """One that was not there before, and then a moment that nobody chose."""
        await_commit(process, self.run)
        moment = time.monotonic() + self.draws.uniform(0, _LATEST_S)
        wait_for(process, lambda: time.monotonic() > moment)

    def _strike(self, process: "subprocess.Popen[str]", fault: Fault) -> None:
        match fault:
            case "rank killed":
                kill(process, _RANK)
            case "all ranks killed":
                for rank in titled(process, _RANK):
                    rank.kill()
            case "rank frozen":
                freeze(process, _RANK)
            case "feed killed":
                kill(process, "ray::Feed")
            case "data worker killed":  # between two tasks it goes by another name
                kill(process, "ray::_build_slabs", optional=True)
                kill(process, "ray::IDLE", optional=True)

    def _end(self, process: "subprocess.Popen[str]", fault: Fault) -> None:
        if fault == "preempted":
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == REPEAT, output(process)
        elif fault == "command killed":  # the next one begins while Ray's processes are dying
            self._orphans += descendants(process)
            process.kill()
            process.wait()
        else:
            kill_everything(process)
        if fault == "machine lost, checkpoint damaged":
            damage(open_store(self.run), self.draws, self.damaged)


pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]

CYCLES, SEED = 20, 21
SETTINGS = (
    "phases=[{steps: 100000, length: 32, batch: {sequences: 48}}]",  # more than there is time for
    "optimizer.adamw.lr=1.0e-4",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 100000}, samples: 20}",
    "watchdog={silence: 5, step: 60, other: 120}",
    "zero=2",
)


def test_twenty_cycles(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=300)
    uri = small_runs.new_run(tmp_path, "chaos", *SETTINGS, "trainers=2")
    chaos = RayChaos(uri, random.Random(SEED))
    steps = chaos.cycles(CYCLES)
    tell(chaos)
    calm = small_runs.new_run(tmp_path, "calm", *SETTINGS)
    finish(calm, 2, stop_at=steps, timeout=1200)
    small_runs.ensure_same(uri, calm, steps)
    small_runs.ensure_whole(uri)


def tell(chaos: RayChaos) -> None:
    figures = measure(small_runs.history(chaos.run))
    assert figures.goodput is not None
    print(f"{CYCLES} cycles, {chaos.starts} commands: {dict(chaos.faults)}")
    times = f"{figures.repeated} repeated, {figures.wall_seconds:.0f} s, goodput {figures.goodput:.1%}"
    print(f"{figures.steps} steps, {times}")
