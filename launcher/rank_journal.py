"""What a rank writes down: rank 0 keeps metrics, events and TensorBoard; every rank gives signs of life."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from encoder_core.train.metrics import StepReport
from launcher.metrics import Journal, evaluation_record
from launcher.startup import Startup
from launcher.stragglers import Detector
from launcher.tensorboard import TensorBoardFiles
from launcher.utilisation import Utilisation

_SLOW = {"data": "gets its data so late that steps take", "compute": "is slow: computing takes it"}


class Link(Protocol):
    """A rank's line to its supervisor."""

    def beat(self, step: int, doing: str, done: int = 0) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop_requested(self) -> bool: ...


@dataclass(frozen=True)
class RankJournal:
    """What only the first rank keeps is None on the others. `hosts`: the name of each rank's machine.

    Nothing here raises because of the store or the disk, and only `flush` and `close` wait for them, a bounded time.
    """

    link: Link
    startup: Startup
    journal: Journal | None
    tensorboard: TensorBoardFiles | None
    stragglers: Detector | None = None
    hosts: Sequence[str] = ()
    utilisation: Utilisation | None = None

    def doing(self, step: int, doing: str, done: int = 0) -> None:
        """A sign of life: what the rank does at `step`, and how much of that is done, in a unit of its own."""
        self.link.beat(step, doing, done)

    def step(self, report: StepReport) -> None:
        self.link.beat(report.before.step + 1, "training")
        if self.journal is None:
            return
        record = report.record()
        if self.utilisation is not None:
            record["mfu"] = self.utilisation.of(record["step"], record["tokens"], record["seconds"])
        self._write(record)
        if not self.startup.over:
            self._underway(record)
        if self.tensorboard is not None:
            self.tensorboard.step(record)
        if not all(report.applied.values()):
            self.event("skipped_step", step=report.before.step, reason=_why_skipped(record))
        self._stragglers(report)
        self.journal.flush_due(time.monotonic())

    def _underway(self, first: dict[str, Any]) -> None:
        self.startup.first_step_done(first["data_wait"])
        driver, seconds = (
            {part: round(time, 3) for part, time in parts.items()}
            for parts in (self.startup.before, self.startup.seconds)
        )
        age = round(self.startup.age, 3)
        self.event("underway", step=first["step"] + 1, seconds=seconds, driver=driver, age=age)
        self.note(f"the first step is done, after {self.startup.spell()}")

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        if self.journal is None:
            return
        record = evaluation_record(step, figures)
        self._write(record)
        if self.tensorboard is not None:
            self.tensorboard.evaluation(record)

    def _stragglers(self, report: StepReport) -> None:
        found = self.stragglers.step(report.paces, report.seconds) if self.stragglers is not None else []
        for slow in found:
            host = self.hosts[slow.rank]
            self.event("straggler", step=report.before.step, host=host, **asdict(slow))
            self.note(f"rank {slow.rank} on {host} {_SLOW[slow.doing]} {slow.ratio:.1f} times as long")

    def event(self, kind: str, **fields: object) -> None:
        if self.journal is not None:
            self.journal.event(kind, time.time(), **fields)

    def note(self, text: str) -> None:
        if self.journal is not None:
            self.link.note(text)

    def flush(self) -> None:
        """What was recorded is on record, unless the store takes longer than a moment for it: then later."""
        if self.journal is not None:
            self.journal.flush()

    def close(self) -> None:
        """Everything on record, files closed, if that is possible in bounded time. Called however training ends."""
        if self.journal is not None and not self.journal.close():
            self.link.note("the newest records could not be written: they are missing from the run's history")
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _write(self, record: dict[str, Any]) -> None:
        assert self.journal is not None
        self.journal.metric(record)
        self.link.record(record)


def _why_skipped(record: dict[str, Any]) -> str:
    if not math.isfinite(record["grad_norm"]):
        return "the gradient was not finite"
    return f"an outlier: a loss of {record['loss']:.4g}, a gradient norm of {record['grad_norm']:.3g}"
