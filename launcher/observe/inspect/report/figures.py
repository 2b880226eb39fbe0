"""The numbers of a report, from a run's history: throughput, waiting, goodput, and every interruption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.observe.inspect.report.summary import Floats, Summary, of_steps
from launcher.runtime.run.history import History, StepHistory
from launcher.runtime.run.metrics import THROUGHPUT, Display, shown_on
from launcher.runtime.run.step_table import Record

SUMMED = ("seconds", "tokens", "data_wait", "skipped")
"""Fields of a step whose sums `figures` needs."""

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
    """A time the run stopped training before its end, and how it came back.

    Attributes:
        time: when, seconds since the epoch, as near as the events tell.
        attempt: the attempt that was interrupted.
        cause: what is known about it.
        resumed_from: the step that training went on from; None if it has not.
        downtime: seconds until training went on, a step of it done if that is on record; None if it has not.
        lost: steps that had to be done again; None if nobody knows.
        recovery: seconds of `downtime` by part, from the beginning of the first rank's function; empty if they are
            not on record. What is not in them went before: the death was noticed, places were found, processes
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
    """What a report states in numbers.

    Attributes:
        steps: steps done on the committed lineage; a fork goes on counting where it began.
        tokens: what the steps on record trained on.
        tokens_per_second: median over the steps.
        data_wait: share of the step time spent waiting for data (slowest rank).
        wall_seconds: from the first start to the last thing on record.
        goodput: share of that time spent in steps that count; None without events.
        repeated: steps that had to be done again after interruptions.
        skipped: steps without an update, their gradients not finite or far too large.
        blocked_seconds: time that checkpoints kept training waiting.
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
    """[n] float64; NaN where a record has no number under `name`."""
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
    """`sums`: over all step records, of each field of `SUMMED`."""
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
    """[n] tokens/s of each step; empty where that is not known."""
    values = of_steps(THROUGHPUT, steps.fields, steps.column)
    return np.empty(0) if values is None else values


def medians(steps: StepHistory, display: Display, newest: int = 0) -> dict[str, float]:
    """Of each figure that a display shows, by name: over the `newest` steps, or over all. Raises StoreError."""
    found = {}
    for metric in shown_on(display):
        values = of_steps(metric, steps.fields, steps.column)
        middle = None if values is None else median(values[-newest:].copy())
        if middle is not None:
            found[metric.name] = middle
    return found


def median(values: Floats) -> float | None:
    """Of those that are numbers; None if none is. Leaves `values` in another order."""
    sound = np.isfinite(values)
    known = values if sound.all() else values[sound]
    return float(np.median(known, overwrite_input=True)) if len(known) else None


def interruptions(history: History) -> list[Interruption]:
    """Return every gap between one attempt and the next, and the one that a stopped run is in."""
    return gaps(history.events)


def gaps(of: Sequence[Record]) -> list[Interruption]:
    """Return the same, from a run's events in order of time."""
    events = [event for event in of if event["kind"] in (*_BEGINS, *_CAUSES, *_ENDS) or event["attempt"]]
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    attempts = [events[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=False)]
    found = (_interruption(*pair) for pair in zip(attempts, [*attempts[1:], []], strict=False))
    return [gap for gap in found if gap is not None]


def _interruption(attempt: Sequence[Record], following: Sequence[Record]) -> Interruption | None:
    """Return what ended an attempt, given its events and those of the next; None if nothing cut it short."""
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
    """Return the event that says most about an attempt's end. A death follows from other events, so it is taken only
    if there is no other."""
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
    """What a page is made from. Its size does not grow with the number of steps, so a watcher can keep it in memory.

    Attributes:
        summary: of the step records on the committed lineage.
        evaluations: evaluation records, steps strictly increasing.
        events: all events, in order of time.
        figures: totals. gaps: every interruption.
        damage: what could not be read, for people.
    """

    summary: Summary
    evaluations: Sequence[Record]
    events: Sequence[Record]
    figures: Figures
    gaps: Sequence[Interruption]
    damage: Sequence[str]

    @classmethod
    def of(cls, history: History) -> "Account":
        """Of a whole history. Raises StoreError."""
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
        """Of what a watcher keeps. `repeated`: step records that were superseded."""
        sums = {name: summary.total(name) for name in SUMMED}
        made = figures(summary.reached, sums, tokens_per_second, events, repeated)
        return cls(summary, evaluations, events, made, gaps(events), damage)
