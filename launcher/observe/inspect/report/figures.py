"""Computes the numbers of a report from a run's history: throughput, data wait, goodput, and every interruption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.observe.inspect.report.summary import Floats, Summary, of_steps
from launcher.runtime.run.history import History, StepHistory
from launcher.runtime.run.metrics import THROUGHPUT, Display, shown_on
from launcher.runtime.run.step_table import Record

SUMMED = ("seconds", "tokens", "data_wait", "skipped")
"""The fields of step records whose sums `figures` needs."""

_BEGINS = ("start", "resume")
_ENDS = ("end",)
_CAUSES = {
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
        time: time of the interruption, in seconds since 1970, as exact as the events tell.
        attempt: the attempt that was interrupted.
        cause: cause, as far as it is known.
        resumed_from: step from which training resumed; None if it has not resumed.
        downtime: seconds until training resumed, including its first step if that is recorded; None if it has not.
        lost: number of steps that had to be repeated; None if it is not known.
        recovery: seconds of `downtime` by part, from the start of the first rank's function; empty if they are not
            recorded. The rest of `downtime` came before: the death was noticed, machines were found, processes
            started.
    """

    time: float
    attempt: int
    cause: str
    resumed_from: int | None
    downtime: float | None
    lost: int | None
    recovery: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """The totals of a run in a report.

    Attributes:
        steps: number of steps done on the committed lineage. A fork's number includes the steps before it.
        tokens: number of tokens in the recorded steps.
        tokens_per_second: median over the steps.
        data_wait: share of the step time in which the slowest rank waited for data.
        wall_seconds: seconds from the first start to the last event.
        goodput: share of that time in steps of the committed lineage; None without steps or time.
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


def column(records: Sequence[Record], name: str) -> Floats:
    """Return [n] float64, a field of n records; NaN where a record has no number under `name`."""
    values = (record.get(name) for record in records)
    return np.array(
        [value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64
    )


def measure(history: History) -> Figures:
    """Return the figures of a history; zeros before the first step."""
    steps = history.steps
    sums = {name: float(np.nansum(steps.column(name))) for name in SUMMED}
    done = int(steps.numbers[-1]) + 1 if len(steps) else 0
    return figures(done, sums, median(rate(steps)) or 0.0, history.events, history.repeated)


def figures(
    steps: int, sums: Mapping[str, float], tokens_per_second: float, events: Sequence[Record], repeated: int
) -> Figures:
    """Return the figures of a run. `sums`: the sum over all step records, for each field of `SUMMED`."""
    busy = sums["seconds"]
    wall = _wall_seconds(events, busy)
    commits = [event for event in events if event["kind"] == "commit"]
    return Figures(
        steps=steps,
        tokens=int(sums["tokens"]),
        tokens_per_second=tokens_per_second,
        data_wait=sums["data_wait"] / busy if busy else 0.0,
        wall_seconds=wall,
        goodput=min(1.0, busy / wall) if busy and wall else None,
        repeated=repeated,
        skipped=int(sums["skipped"]),
        blocked_seconds=sum(float(event.get("blocked", 0.0)) for event in commits),
    )


def rate(steps: StepHistory) -> Floats:
    """Return [n], the tokens/s of each step; empty if the steps do not record it."""
    values = of_steps(THROUGHPUT, steps.fields, steps.column)
    return np.empty(0) if values is None else values


def medians(steps: StepHistory, display: Display, newest: int = 0) -> dict[str, float]:
    """Return the median of each figure that a display shows, by name, over the `newest` steps (0: over all). Raises
    StoreError."""
    found = {}
    for metric in shown_on(display):
        values = of_steps(metric, steps.fields, steps.column)
        middle = None if values is None else median(values[-newest:].copy())
        if middle is not None:
            found[metric.name] = middle
    return found


def median(values: Floats) -> float | None:
    """Return the median of the finite values; None if there are none. Changes the order of `values`."""
    sound = np.isfinite(values)
    known = values if sound.all() else values[sound]
    return float(np.median(known, overwrite_input=True)) if len(known) else None


def interruptions(history: History) -> list[Interruption]:
    """Return the interruptions between attempts, and the last one if the run has not resumed."""
    return gaps(history.events)


def gaps(of: Sequence[Record]) -> list[Interruption]:
    """Return the interruptions of a run from its events, which must be in order of time."""
    events = [event for event in of if event["kind"] in (*_BEGINS, *_CAUSES, *_ENDS) or event["attempt"]]
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    attempts = [events[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=False)]
    found = (_interruption(*pair) for pair in zip(attempts, [*attempts[1:], []], strict=False))
    return [gap for gap in found if gap is not None]


def _interruption(attempt: Sequence[Record], following: Sequence[Record]) -> Interruption | None:
    """Return the interruption of an attempt, given its events and those of the next one; None if it was not
    interrupted."""
    told = _told(attempt)
    if (told is not None and told["kind"] in _ENDS) or (told is None and not following):
        return None
    time = float((told or attempt[-1])["time"])
    resumed = int(following[0]["step"]) if following else None
    underway = next((event for event in following if event["kind"] == "underway"), None)
    last = next((int(event["step"]) for event in reversed(attempt) if event["kind"] == "death"), None)
    return Interruption(
        time=time,
        attempt=int(attempt[0]["attempt"]),
        cause=_cause(told),
        resumed_from=resumed,
        downtime=float((underway or following[0])["time"]) - time if following else None,
        lost=None if last is None or resumed is None else max(0, last - resumed),
        recovery={} if underway is None else underway["seconds"],
    )


def _told(attempt: Sequence[Record]) -> Record | None:
    """Return the event that says most about an attempt's end. Deaths follow from other events, so one is returned only
    if there is no other event."""
    about = [event for event in attempt if event["kind"] in (*_CAUSES, *_ENDS)]
    telling = [event for event in about if event["kind"] != "death"] or about
    return telling[-1] if telling else None


def _cause(event: dict[str, Any] | None) -> str:
    if event is None:
        return "killed without notice (last event before it shown)"
    reason = str(event.get("reason") or event.get("what") or "")
    return _CAUSES[event["kind"]] + (f": {reason}" if reason else "")


def _wall_seconds(events: Sequence[Record], busy: float) -> float:
    times = [float(event["time"]) for event in events if event["attempt"] > 0]
    return max(times) - min(times) if len(times) > 1 else busy


@dataclass(frozen=True)
class Account:
    """The content of a page. Its size does not grow with the number of steps, so a watcher can keep it in memory.

    Attributes:
        summary: summary of the step records on the committed lineage.
        evaluations: evaluation records; their steps strictly increase.
        events: all events, in order of time.
        figures: totals.
        gaps: all interruptions.
        damage: messages about what could not be read.
    """

    summary: Summary
    evaluations: Sequence[Record]
    events: Sequence[Record]
    figures: Figures
    gaps: Sequence[Interruption]
    damage: Sequence[str]

    @classmethod
    def of(cls, history: History) -> "Account":
        """Return the account of a whole history. Raises StoreError."""
        return cls(
            Summary.of(history.steps),
            history.evaluations,
            history.events,
            measure(history),
            gaps(history.events),
            history.damage,
        )

    @classmethod
    def kept(
        cls,
        summary: Summary,
        evaluations: Sequence[Record],
        events: Sequence[Record],
        *,
        repeated: int,
        tokens_per_second: float,
        damage: Sequence[str],
    ) -> "Account":
        """Return the account of what a watcher keeps. `repeated`: number of step records that were superseded."""
        sums = {name: summary.total(name) for name in SUMMED}
        made = figures(summary.reached, sums, tokens_per_second, events, repeated)
        return cls(summary, evaluations, events, made, gaps(events), damage)
