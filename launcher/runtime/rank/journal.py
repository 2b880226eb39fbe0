"""The records of a rank: rank 0 writes metrics and events; every rank sends heartbeats.

`Utilisation` is model FLOPs utilisation (MFU; Chowdhery et al. 2022, appendix B): the FLOPs that a step needs, divided
by the FLOPs that the devices could compute in its time. Recomputation does not count. FLOPs are counted once per phase,
for full rows, by `encoder_core.train.counting`. A GPU's peak is its vendor's figure. CPUs have no MFU: the speed of a
core depends on the load of the others, so it can exceed a measured peak many times over.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch

from encoder_core.train.metrics import StepReport
from launcher.runtime.capacity.devices import match_gpu_by_device_name
from launcher.runtime.capacity.workload import microbatch_shape, model_cost
from launcher.runtime.policies.stragglers import StragglerDetector
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.run.log import RunLog, evaluation_record


@dataclass(frozen=True)
class Utilisation:
    """The model FLOPs utilisation (MFU) of a run on given devices.

    Attributes:
        ends: first step after each phase.
        flops: FLOPs of a token in each phase, forward and backward.
        peak: FLOP/s of all ranks' devices together.
    """

    ends: tuple[int, ...]
    flops: tuple[float, ...]
    peak: float

    def share(self, step: int, tokens: int, seconds: float) -> float:
        """Return the utilisation (0 to 1) in the step after `step` steps, which had `tokens` and took `seconds`."""
        phase = min(bisect_right(self.ends, step), len(self.ends) - 1)
        return tokens * self.flops[phase] / (max(seconds, 1e-9) * self.peak)


def run_utilisation(recipe: Recipe, vocabulary: int, device: torch.device, ranks: int) -> Utilisation | None:
    """Return the utilisation of a run; None if the device's peak is not known.

    `device`: this rank's device; the other ranks' are assumed to be equal. `vocabulary`: the tokenizer's size, for a
    model without a size of its own.
    """
    speed = peak_flops(device, recipe.precision)
    if speed is None:
        return None
    known = recipe.model_copy(update={"model": with_vocab(recipe.model, vocabulary)})
    shapes = (microbatch_shape(recipe, phase, recipe.input.texts_per_row) for phase in recipe.phases)
    flops = tuple(model_cost(known, shape).model / shape.tokens for shape in shapes)
    return Utilisation(tuple(accumulate(phase.steps for phase in recipe.phases)), flops, speed * ranks)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the vendor's FLOP/s of dense matrix products in this precision; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    gpu = match_gpu_by_device_name(found.name, found.total_memory)
    if gpu is None:
        return None
    return gpu.peak if precision == "bf16" else gpu.peak_fp32


# Middle of the message about a slow rank ("rank 3 on HOST ... 1.5 times as long"), by what is slow.
_SLOW_TEXTS = {"data": "gets its data so late that steps take", "compute": "is slow: computing takes it"}

EndAction = Literal["save", "hand over"]
"""What ranks do with the last state when they end: save it, or leave it in memory for ranks that continue at once."""


class SupervisorLink(Protocol):
    """The connection of a rank to its supervisor: `beat` sends a heartbeat, `note` shows a line to the operator."""

    def beat(self, step: int, doing: str, done: int = 0) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...
    def stop_requested(self) -> bool: ...
    @property
    def end_action(self) -> EndAction | None: ...


@dataclass(frozen=True)
class RankJournal:
    """The recorder of a rank's work. Only rank 0 writes metrics and events, to `journal`, which is None on other ranks.
    `hosts`: name of each rank's machine.

    No method raises errors of the store. Only `flush` and `close` wait for the store, for a limited time.
    """

    link: SupervisorLink
    startup: StartupClock
    journal: RunLog | None
    stragglers: StragglerDetector | None = None
    hosts: Sequence[str] = ()
    utilisation: Utilisation | None = None

    def report_activity(self, step: int, doing: str, done: int = 0) -> None:
        """Set the content of the next heartbeats: step, activity, and how much of the activity is done, in any unit."""
        self.link.beat(step, doing, done)

    def report_step(self, report: StepReport) -> None:
        self.link.beat(report.before.step + 1, "training")
        if self.journal is None:
            return
        record = report.to_record()
        if self.utilisation is not None:
            record["mfu"] = self.utilisation.share(record["step"], record["tokens"], record["seconds"])
        self._write_record(record)
        if not self.startup.over:
            self._record_first_step(record)
        if not all(report.applied_by_group.values()):
            self.event("skipped_step", step=report.before.step, reason=_skip_reason(record))
        self._report_stragglers(report)
        self.journal.flush_if_due(time.monotonic())

    def _record_first_step(self, record: dict[str, Any]) -> None:
        self.startup.end_first_step(record["data_wait"])
        driver, seconds = (
            {part: round(time, 3) for part, time in parts.items()}
            for parts in (self.startup.before, self.startup.seconds)
        )
        age = round(self.startup.age, 3)
        self.event(
            "underway",
            step=record["step"] + 1,
            seconds=seconds,
            driver=driver,
            age=age,
            processes=self.startup.processes,
        )
        self.note(f"the first step is done, after {self.startup.to_text()}")

    def report_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        if self.journal is None:
            return
        self._write_record(evaluation_record(step, figures))

    def _report_stragglers(self, report: StepReport) -> None:
        found = self.stragglers.add_step(report.paces, report.seconds) if self.stragglers is not None else []
        for slow in found:
            host = self.hosts[slow.rank]
            self.event("straggler", step=report.before.step, host=host, **asdict(slow))
            self.note(f"rank {slow.rank} on {host} {_SLOW_TEXTS[slow.doing]} {slow.ratio:.1f} times as long")

    def event(self, kind: str, **fields: object) -> None:
        """Record an event on rank 0; do nothing on other ranks."""
        if self.journal is not None:
            self.journal.event(kind, time.time(), **fields)

    def rank_event(self, kind: str, *, step: int | None, reason: str) -> None:
        """Record an event that only this rank knows, and show it to the operator; any rank may call this."""
        self.link.event(kind, {"step": step, "reason": reason})

    def note(self, text: str) -> None:
        """Show a line to the operator on rank 0; do nothing on other ranks."""
        if self.journal is not None:
            self.link.note(text)

    def pending_lines(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of stored segments (files) of step records, and the records that are not yet stored."""
        return self.journal.pending_lines() if self.journal is not None else (0, ())

    def restore(self, lines: Sequence[str]) -> None:
        """Add step records that an earlier attempt could not write."""
        if self.journal is not None:
            self.journal.restore(lines)

    def flush(self) -> None:
        """Write the records so far. If the store is slow, they are written later."""
        if self.journal is not None:
            self.journal.flush()

    def close(self) -> None:
        """Write all records, within a limited time. This is called at every end of training."""
        if self.journal is not None and not self.journal.close():
            self.link.note("the newest records could not be written: they are missing from the run's history")

    def _write_record(self, record: dict[str, Any]) -> None:
        assert self.journal is not None
        self.journal.add_metrics(record)
        self.link.record(record)


def _skip_reason(record: dict[str, Any]) -> str:
    if not math.isfinite(record["grad_norm"]):
        return "the gradient was not finite"
    return f"an outlier: a loss of {record['loss']:.4g}, a gradient norm of {record['grad_norm']:.3g}"
