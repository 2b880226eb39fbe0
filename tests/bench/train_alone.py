"""A run trained by this process alone, without Ray, and what it cost."""

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from checkpoints.attempt import Attempt, claim
from checkpoints.gather import Alone
from encoder_core.train.exchange import Control
from launcher.runtime.rank.main import run_rank
from launcher.runtime.rank.startup import Startup
from launcher.runtime.run.record import Run
from tests.support.data.synthetic import InProcess


@dataclass(frozen=True)
class Spent:
    """What training took (evaluation left out), and the last evaluation's figures."""

    tokens: int
    cpu_seconds: float
    figures: dict[str, float]


@dataclass
class _Meter:
    """The rank's link to its supervisor, which here is a clock: CPU time between records of steps."""

    ends = None

    tokens: int = 0
    cpu_seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    _mark: float = field(default_factory=time.process_time)

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        if doing != "training":
            self._mark = time.process_time()

    def record(self, record: dict[str, Any]) -> None:
        now = time.process_time()
        if record["kind"] == "step":
            self.tokens += record["tokens"]
            self.cpu_seconds += now - self._mark
        else:
            self.figures = {name: value for name, value in record.items() if isinstance(value, float)}
        self._mark = now

    def note(self, text: str) -> None:
        pass

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        pass

    def stop_requested(self) -> bool:
        return False


def train_alone(run: Run) -> Spent:
    """Train `run` to its end on one rank, in this process, which must not have a process group yet; on one core."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed insists
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    meter = _Meter()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        attempt = Attempt(run.store, claim(run.store).number)
        run_rank(run, attempt, Control.join(), Alone(), InProcess, meter, Startup())
        dist.destroy_process_group()
    return Spent(meter.tokens, meter.cpu_seconds, meter.figures)
