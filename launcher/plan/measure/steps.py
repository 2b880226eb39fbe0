"""Real steps of a run on one rank, timed part by part. The training loop itself runs, but saves and records nothing.

The first steps are warm-up and not counted: they allocate memory, and DeepSpeed prepares itself. During the last
warm-up step torch's profiler measures the time of collectives and kernels.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from encoder_core.batch import Batch
from encoder_core.optim.updates import WHOLE
from encoder_core.train.engine import Engine, Update
from encoder_core.train.exchange import Control
from encoder_core.train.loop import Trainer
from encoder_core.train.memory import Carried
from encoder_core.train.metrics import StepReport
from encoder_core.train.state import TrainState
from encoder_core.train.timing import Stopwatch
from launcher.plan.measure.requests import Measured, MeasureRequest, Step
from launcher.plan.measure.rows import InProcess
from launcher.runtime.rank.build import (
    build_model,
    build_optimizer,
    engine_config,
    set_determinism,
    teach_anything,
    training_plan,
)
from launcher.runtime.rank.data import RankData, RankShard
from launcher.runtime.rank.journal import peak, utilisation
from launcher.runtime.run.log import encode
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import sample_positions, stream_spec

_COLLECTIVE = timedelta(minutes=10)
WARM_UP = 3  # steps, the last of them profiled
_FEWEST, _MOST = 3, 100  # timed steps
ENOUGH_S = 5.0  # of timed steps, if there are the fewest
_OPERATORS = 5  # the slowest ones are told
_COLLECTIVES, _KERNELS = "gloo:", ("ncclDev", "ncclKernel")  # how they are called, on a CPU and on a GPU
_STATUS, _HIGH_WATER = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def take_steps(run: Run, control: Control, seconds: float = ENOUGH_S) -> Measured:
    """Train `run` from fresh weights for about `seconds` seconds, and return what was measured. Collective.

    torch's process group must exist, and the device must be chosen.
    """
    tokenizer, recipe = run.tokenizer(), run.recipe
    set_determinism(recipe.deterministic)
    memory = _Memory()
    model = build_model(recipe, tokenizer)
    teach_anything(model, recipe, tokenizer.vocab_size)
    engine = TimedEngine(model, build_optimizer(recipe, model), engine_config(recipe))
    speed = peak(engine.device, recipe.precision)
    stream = InProcess(stream_spec(run, tokenizer, 0))
    positions = sample_positions(run, [stream], ())
    share = RankShard(control.rank, control.world, recipe.phase_microbatches)
    data = RankData(
        [stream],
        positions,
        ([stream], 0),
        share,
        engine.device,
        model.target_counts,
        recipe.memory_refresh,
    )
    watch = _Watch(engine, control, memory, seconds)
    plan = replace(training_plan(recipe), evaluate_every=None)
    with closing(data):
        Trainer(engine, control, data, _NoKeeper(), _AnyLoss(), watch, plan, watch.enough).train(TrainState())
    meter = utilisation(recipe, tokenizer.vocab_size, engine.device, control.world)
    mfu = () if meter is None else tuple(meter.of(0, step.tokens, step.seconds) for step in watch.steps)
    found = _Profiled.of(watch.profiler, watch.profiled_seconds)
    return Measured(tuple(watch.steps), watch.peak_bytes, speed, mfu, found.exchange, found.operators)


def carry_out(order: MeasureRequest) -> None:
    """Take the steps of `order` and write the result. It creates and destroys the process group of torch, so it runs
    in a process of its own.
    """
    torch.set_num_threads(order.threads)
    if order.device == "cuda":
        torch.cuda.set_device(order.rank)
    dist.init_process_group(
        "nccl" if order.device == "cuda" else "gloo",
        init_method=f"file://{order.meeting}",
        rank=order.rank,
        world_size=order.world,
        timeout=_COLLECTIVE,
    )
    try:
        taken = take_steps(open_run(order.run), Control.join())
        Path(order.result).write_text(encode(asdict(taken)), "utf-8")
    finally:
        dist.destroy_process_group()


class TimedEngine(Engine):
    """An engine that times its forward and backward passes and its updates."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.watches = {name: Stopwatch(self.device) for name in ("forward", "backward", "last", "update")}

    def __call__(self, batch: Batch, memory: tuple[Tensor, ...] = ()) -> Any:
        with self.watches["forward"]:
            return super().__call__(batch, memory)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        with self.watches["last" if last else "backward"]:
            super().backward(loss, last=last)

    def update(self, lr: float, count: int, turn: str = WHOLE, largest_norm: float = float("inf")) -> Update:
        with self.watches["update"]:
            return super().update(lr, count, turn, largest_norm)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        return {name: watch.take() for name, watch in self.watches.items()}


@dataclass
class _Watch:
    """The loop's journal: it notes the times of each step, and says when enough steps are timed."""

    engine: TimedEngine
    control: Control
    memory: "_Memory"
    seconds: float
    steps: list[Step] = field(default_factory=list)
    peak_bytes: int = 0
    profiled_seconds: float = 0.0
    profiler: Any = None
    _begun: float = 0.0

    def doing(self, step: int, doing: str, done: int = 0) -> None:
        pass

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        pass

    def step(self, report: StepReport) -> None:
        number, parts = report.before.step, self.engine.take()
        if number >= WARM_UP:
            data = report.paces[self.control.rank].data
            backward = parts.pop("backward") + parts["last"]
            tokens = report.signals.tokens
            self.steps.append(
                Step(seconds=report.seconds, data=data, backward=backward, tokens=tokens, **parts)
            )
        elif number == WARM_UP - 2:  # memory is at its highest, and the profiler's own not there yet
            self.peak_bytes = self.memory.peak()
            self.profiler = profile(activities=_activities(self.engine.device))
            self.profiler.start()
        elif number == WARM_UP - 1:
            self.profiler.stop()
            self.profiled_seconds, self._begun = report.seconds, time.monotonic()

    def enough(self) -> bool:
        """Return whether to stop, by rank 0's clock; the loop tells the other ranks."""
        if self.control.rank or len(self.steps) < _FEWEST:
            return False
        return len(self.steps) >= _MOST or time.monotonic() - self._begun > self.seconds


class _AnyLoss:
    """A loss monitor that accepts every loss, because random text cannot be learnt."""

    def limit(self, step: int, turn: str, sums: Mapping[str, float]) -> float:
        return float("inf")

    def after(self, report: StepReport) -> None:
        pass


class _NoKeeper:
    """A checkpoint keeper that saves nothing."""

    def due(self, step: int) -> bool:
        return False

    def ready(self) -> bool:
        return False

    def begin(self, engine: Engine, state: TrainState) -> None:
        raise AssertionError("no save is ever due")

    def commit(self) -> None:
        raise AssertionError("nothing was saved")

    def finish(self, engine: Engine, state: TrainState, carried: Carried) -> None:
        pass


class _Memory:
    """Bytes allocated since this object was made: by torch's allocator on a GPU, else by this process."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            _HIGH_WATER.write_text("5")  # the kernel begins anew with the highest that it has seen
            self._before = _status("VmRSS")

    def peak(self) -> int:
        now = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")
        return max(0, now - self._before)


def _status(name: str) -> int:
    """Return a size, in bytes, that the kernel states for this process."""
    line = next(line for line in _STATUS.read_text("utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]


@dataclass(frozen=True)
class _Profiled:
    """The profiler's measurements of one step."""

    exchange: float
    operators: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, profiler: Any, seconds: float) -> "_Profiled":
        """Sum up kernels where there is a GPU, else operators without the operators that they call. Times are in
        microseconds.
        """
        events = profiler.key_averages()
        cuda = any(event.self_device_time_total for event in events)
        exchange, taken = 0.0, Counter[str]()
        for event in events:
            if event.key.startswith(_KERNELS if cuda else _COLLECTIVES):  # gloo's have no time of their own
                exchange += event.self_device_time_total if cuda else event.cpu_time_total
            elif event.key.startswith("aten::"):
                spent = event.self_device_time_total if cuda else event.self_cpu_time_total
                taken[event.key.removeprefix("aten::")] += spent
        whole = sum(taken.values())
        slowest = [(name, spent / whole) for name, spent in taken.most_common(_OPERATORS) if whole]
        return cls(min(1.0, exchange / 1e6 / max(seconds, 1e-9)), tuple(slowest))


if __name__ == "__main__":
    carry_out(MeasureRequest.model_validate_json(sys.argv[1]))
