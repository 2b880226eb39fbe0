"""Computes the numbers of a report from a run's history: throughput, data wait, goodput, and every interruption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.runtime.run.history import History, StepHistory
from launcher.runtime.run.metrics import THROUGHPUT, DisplayName, Metric, metrics_shown_on
from launcher.runtime.run.step_table import Record

Floats = NDArray[np.float64]

_START_KINDS = ("start", "resume")  # kinds of events with which an attempt begins
_END_KINDS = ("end",)  # kinds of events with which a run ends
_CAUSE_BY_EVENT_KIND = {  # why training was interrupted, in words for the user
    "stop": "asked to stop",
    "death": "ranks died",
    "hang": "ranks were stuck",
    "failed": "failed",
    "corruption": "weights differed between ranks",
    "pause": "paused",
    "rewind": "went back",
}


@dataclass(frozen=True)
class Interruption:
    """An interruption of training before the run's end, and how the run resumed.

    Attributes:
        time: time of the interruption, in seconds since 1970, as exactly as events show it.
        attempt: number of the attempt (start of training) that was interrupted.
        cause: cause, as far as it is known.
        resumed_from: step from which training resumed; None if it has not resumed.
        downtime: seconds until training resumed, including its first step if that is recorded; None if it has not.
        lost: number of steps that had to be repeated; None if it is not known.
        recovery: seconds of `downtime` by part, from the start of the first rank's function; empty if they are not
            recorded. The rest of `downtime` came earlier: noticing the failure, finding machines, starting processes.
    """

    time: float
    attempt: int
    cause: str
    resumed_from: int | None
    downtime: float | None
    lost: int | None
    recovery: Mapping[str, float]


@dataclass(frozen=True)
class RunFigures:
    """The totals of a run in a report.

    Attributes:
        steps: number of steps done; repeated steps count once. A fork's number includes the steps before it.
        tokens: number of tokens in the recorded steps.
        tokens_per_second: median over the steps.
        data_wait: share of the step time in which the slowest rank waited for data.
        wall_seconds: seconds from the first start to the last event, or for a run that trains, to now.
        goodput: share of that time that these steps took; None without steps or time.
        repeated: number of steps that were repeated after interruptions.
        skipped: number of steps without an update, because gradients were not finite or far too large.
        blocked_seconds: seconds in which training waited for checkpoints.
    """

    steps: int
    tokens: int
    tokens_per_second: float
    data_wait: float
    wall_seconds: float
    goodput: float | None
    repeated: int
    skipped: int
    blocked_seconds: float


def compute_figures(history: History, until: float | None = None) -> RunFigures:
    """Return the totals of a run's history; zeros before the first step. `until`: when the run was last seen to train,
    if that may be after its last event, as seconds since 1970. Raises StoreError."""
    steps, events = history.steps, history.events
    sums = {name: float(np.nansum(steps.column(name))) for name in ("seconds", "tokens", "data_wait", "skipped")}
    busy = sums["seconds"]
    times = [float(event["time"]) for event in events if event["attempt"] > 0]
    ends = [*times, *([] if until is None else [until])]
    wall = max(ends) - min(times) if times and len(ends) > 1 else busy
    commits = [event for event in events if event["kind"] == "commit"]
    return RunFigures(
        steps=int(steps.numbers[-1]) + 1 if len(steps) else 0,
        tokens=int(sums["tokens"]),
        tokens_per_second=_finite_median(metric_values(THROUGHPUT, steps)) or 0.0,
        data_wait=sums["data_wait"] / busy if busy else 0.0,
        wall_seconds=wall,
        goodput=min(1.0, busy / wall) if busy and wall else None,
        repeated=history.repeated,
        skipped=int(sums["skipped"]),
        blocked_seconds=sum(float(event.get("blocked", 0.0)) for event in commits),
    )


def metric_values(metric: Metric, steps: StepHistory) -> Floats | None:
    """Return [n], the values of a metric in n steps; None if the steps do not record it. Raises StoreError."""
    if metric.name in steps.fields:
        return steps.column(metric.name)
    if metric.ratio is None or not all(name in steps.fields for name in metric.ratio):
        return None
    part, whole = map(steps.column, metric.ratio)
    return part / np.maximum(whole, 1e-9)


def metric_mean(metric: Metric, steps: StepHistory) -> float | None:
    """Return the mean of a metric over all steps that have it; for a ratio, the ratio of the sums. None if no step has
    it. Raises StoreError."""
    if metric.ratio is not None and all(name in steps.fields for name in metric.ratio):
        return metric.value_in({name: float(np.nansum(steps.column(name))) for name in metric.ratio})
    known = metric_values(metric, steps)
    finite = known[np.isfinite(known)] if known is not None else ()
    return float(np.mean(finite)) if len(finite) else None


def metric_medians(steps: StepHistory, display: DisplayName, newest: int = 0) -> dict[str, float]:
    """Return, by name, the median of each metric that `display` shows, over the `newest` steps (0: over all). Raises
    StoreError."""
    found = {}
    for metric in metrics_shown_on(display):
        known = metric_values(metric, steps)
        middle = None if known is None else _finite_median(known[-newest:].copy())
        if middle is not None:
            found[metric.name] = middle
    return found


def _finite_median(values: Floats | None) -> float | None:
    """Return the median of the finite values; None if there are none. Changes the order of `values`."""
    if values is None:
        return None
    finite = np.isfinite(values)
    used = values if finite.all() else values[finite]
    return float(np.median(used, overwrite_input=True)) if len(used) else None


def find_interruptions(history: History) -> list[Interruption]:
    """Return the interruptions between attempts, and the last one if the run has not resumed."""
    kinds = (*_START_KINDS, *_CAUSE_BY_EVENT_KIND, *_END_KINDS)
    events = [event for event in history.events if event["kind"] in kinds or event["attempt"]]
    begins = [index for index, event in enumerate(events) if event["kind"] in _START_KINDS]
    attempts = [events[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=False)]
    found = (_interruption(*pair) for pair in zip(attempts, [*attempts[1:], []], strict=False))
    return [gap for gap in found if gap is not None]


def _interruption(attempt: Sequence[Record], following: Sequence[Record]) -> Interruption | None:
    """Return the interruption of an attempt, given its events and those of the next one; None if it was not
    interrupted."""
    last = _last_cause_event(attempt)
    if (last is not None and last["kind"] in _END_KINDS) or (last is None and not following):
        return None
    time = float((last or attempt[-1])["time"])
    resumed = int(following[0]["step"]) if following else None
    underway = next((event for event in following if event["kind"] == "underway"), None)
    reached = next((int(event["step"]) for event in reversed(attempt) if event["kind"] == "death"), None)
    return Interruption(
        time=time,
        attempt=int(attempt[0]["attempt"]),
        cause=_cause_text(last),
        resumed_from=resumed,
        downtime=float((underway or following[0])["time"]) - time if following else None,
        lost=None if reached is None or resumed is None else max(0, reached - resumed),
        recovery={} if underway is None else underway["seconds"],
    )


def _last_cause_event(attempt: Sequence[Record]) -> Record | None:
    """Return the event that explains an attempt's end best. Deaths follow from other events, so a death is returned
    only if there is no other event."""
    causes = [event for event in attempt if event["kind"] in (*_CAUSE_BY_EVENT_KIND, *_END_KINDS)]
    first_hand = [event for event in causes if event["kind"] != "death"] or causes
    return first_hand[-1] if first_hand else None


def _cause_text(event: Record | None) -> str:
    if event is None:
        return "killed without notice (last event before it shown)"
    reason = str(event.get("reason") or event.get("what") or "")
    return _CAUSE_BY_EVENT_KIND[event["kind"]] + (f": {reason}" if reason else "")
