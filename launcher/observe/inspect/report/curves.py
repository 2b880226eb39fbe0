"""Which curves a report shows: losses, accuracies, learning rate, gradient norm, throughput, waiting; of one run, or of
several over each other. And where the wall time went: one bar of attempts and gaps, with a tick for every
checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np

from launcher.format import human_count, human_duration
from launcher.observe.inspect.report.chart import Chart, ChartMark, Floats, Level, Series
from launcher.observe.inspect.report.figures import Account, Interruption, column
from launcher.observe.inspect.report.summary import RATE, Axis, Summary
from launcher.runtime.run.step_table import Record

_TOKEN_LOSSES = ("mlm_loss", "plm_loss")
_SHARES = {
    "_accuracy": "share of targets",
    "_precision": "of the tokens called replaced",
    "_recall": "of the tokens replaced",
    "_replaced": "share of tokens that were",
}
_MANY = 20_000  # steps, from which on the axis abbreviates


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _short(value: float) -> str:
    return f"{value:.2g}"


def _hours(value: float) -> str:
    return f"{value:.3g} h"


@dataclass(frozen=True)
class _Plain:
    """A chart that every run has: one field of its steps."""

    title: str
    unit: str
    field: str
    name: str
    tone: int
    format: Callable[[float], str]


_PLAIN = (
    _Plain("Learning rate", "", "lr", "lr", 1, _short),
    _Plain("Gradient norm", "before clipping", "grad_norm", "norm", 4, lambda value: f"{value:.3g}"),
    _Plain("Throughput", "tokens/s", RATE, "tokens/s", 3, human_count),
    _Plain("Data wait", "share of the step, slowest rank", "data_wait_share", "data wait", 3, _percent),
    _Plain("Utilisation", "model FLOPs, of the devices' peak", "mfu", "mfu", 1, _percent),
)


def charts(account: Account, baselines: Mapping[str, float], axis: Axis = "steps") -> Iterator[Chart]:
    """The charts of a run; `baselines` are drawn into the loss, what happened on the way as marks."""
    summary = account.summary
    chart = partial(_chart, [summary], axis, marks=_marks(account, axis))
    levels = tuple(Level(name, value) for name, value in baselines.items())
    losses = _names(summary.fields, "_loss")
    both = partial(_both, account, axis)
    if len(losses) > 1:
        yield chart("Loss", "weighted sum of all terms, nats", both("loss"))
    for name in losses:
        counted = levels if name in _TOKEN_LOSSES else ()
        yield chart(f"{_term(name)} loss", "nats per target", both(name), levels=counted)
    evaluated = {name for record in account.evaluations for name in record}
    for suffix, unit in _SHARES.items():
        for name in _names(evaluated, suffix):
            title = f"{_term(name)} {suffix[1:]}"
            yield chart(title, unit, both(name), zero=True, format=_percent)
    for name in _names(evaluated, "_similarity"):
        yield chart(f"{_term(name)} similarity", "mean of queries", both(name))
    for plain in _PLAIN:
        series = _trained(summary, plain.field, axis, plain.name, plain.tone)
        yield chart(plain.title, plain.unit, (series,), zero=True, format=plain.format)


@dataclass(frozen=True)
class ComparedRun:
    """One of several runs: its name on the page, its colour, and what happened in it."""

    name: str
    tone: int
    account: Account


def compared(runs: Sequence[ComparedRun], axis: Axis) -> Iterator[Chart]:
    """The curves of several runs over each other: a chart for each loss, in training and held out, and more."""
    chart = partial(_chart, [run.account.summary for run in runs], axis)
    recorded = {name for run in runs for name in run.account.summary.fields}
    evaluated = {name for run in runs for record in run.account.evaluations for name in record}
    for name in _names(recorded | evaluated, "_loss"):
        held_out = tuple(_held_out(run.account, name, axis, run.name, run.tone) for run in runs)
        yield chart(f"{_term(name)} loss, held out", "nats per target", held_out)
        trained = tuple(_trained(run.account.summary, name, axis, run.name, run.tone) for run in runs)
        yield chart(f"{_term(name)} loss, training", "nats per target", trained)
    for name in _names(evaluated, "_accuracy"):
        held_out = tuple(_held_out(run.account, name, axis, run.name, run.tone) for run in runs)
        yield chart(
            f"{_term(name)} accuracy, held out", _SHARES["_accuracy"], held_out, zero=True, format=_percent
        )
    for plain in _PLAIN:
        series = tuple(_trained(run.account.summary, plain.field, axis, run.name, run.tone) for run in runs)
        yield chart(plain.title, plain.unit, series, zero=True, format=plain.format)


def _chart(
    summaries: Sequence[Summary],
    axis: Axis,
    title: str,
    unit: str,
    series: tuple[Series, ...],
    *,
    levels: tuple[Level, ...] = (),
    marks: tuple[ChartMark, ...] = (),
    zero: bool = False,
    format: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> Chart:
    """Over the whole of what any of the runs has done."""
    begun = [summary for summary in summaries if summary.records]
    start = min((float(summary.along(summary.first[:1], axis)[0]) for summary in begun), default=0.0)
    end = max((float(summary.along([summary.reached], axis)[0]) for summary in begun), default=1.0)
    names = {"steps": "step", "tokens": "tokens", "hours": "of training"}
    formats = {"steps": human_count if end > _MANY else _whole, "tokens": human_count, "hours": _hours}
    return Chart(
        title,
        unit,
        series,
        x_end=end,
        levels=levels,
        marks=marks,
        x_start=start,
        zero=zero,
        format=format,
        x_name=names[axis],
        x_format=formats[axis],
    )


def _both(account: Account, axis: Axis, name: str) -> tuple[Series, Series]:
    return _trained(account.summary, name, axis, "training", 1), _held_out(account, name, axis, "held out", 2)


def _trained(summary: Summary, name: str, axis: Axis, label: str, tone: int) -> Series:
    curve = summary.curve(name, axis)
    return Series(label, curve.x, curve.y, tone, low=curve.low, high=curve.high)


def _held_out(account: Account, name: str, axis: Axis, label: str, tone: int) -> Series:
    done, values = column(account.evaluations, "step"), column(account.evaluations, name)
    known = np.isfinite(values)
    return Series(label, account.summary.along(done[known], axis), values[known], tone, dots=True)


def _marks(account: Account, axis: Axis) -> tuple[ChartMark, ...]:
    told = [
        (float(gap.resumed_from), _interrupted(gap)) for gap in account.gaps if gap.resumed_from is not None
    ]
    told += [(float(event["step"]), text) for event in account.events if (text := _happened(event))]
    told.sort()
    places: Floats = account.summary.along([step for step, _ in told], axis)
    return tuple(ChartMark(float(x), text) for x, (_, text) in zip(places, told, strict=True))


def _interrupted(gap: Interruption) -> str:
    return f"interrupted: {gap.cause}"


def _happened(event: Record) -> str:
    """What is worth a mark besides interruptions."""
    if event["kind"] == "straggler":
        return f"rank {event['rank']} held up the others"
    if event["kind"] == "commit_failed":
        return f"no checkpoint: {event.get('reason')}"
    return ""


def _term(name: str) -> str:
    return name.rpartition("_")[0].replace("_", " ").upper()


def _names(fields: Iterable[str], suffix: str) -> list[str]:
    return sorted(name for name in fields if name.endswith(suffix))


def _whole(value: float) -> str:
    return f"{value:,.0f}"


_WIDTH, _BAR = 1060, 26
_MOST_COMMITS = 1000  # drawn, the newest
_BEGINS = ("start", "resume")


def draw_timeline(told: Sequence[Record]) -> str:
    """An SVG figure of a run's events; empty text without two of them to span a time."""
    events = [event for event in told if event["attempt"] > 0]
    if len(events) < 2 or events[-1]["time"] <= events[0]["time"]:
        return ""
    first, span = float(events[0]["time"]), float(events[-1]["time"]) - float(events[0]["time"])
    shapes = [f'<rect class="idle" x="0" y="4" width="{_WIDTH}" height="{_BAR}"/>']
    for begin, end in _spans(events):
        x, width = _WIDTH * (begin["time"] - first) / span, _WIDTH * (end["time"] - begin["time"]) / span
        length = human_duration(end["time"] - begin["time"])
        title = (
            f"<title>attempt {begin['attempt']}: {escape(length)} from step {begin.get('step', 0):,}</title>"
        )
        box = f'x="{x:.1f}" y="4" width="{max(width, 1.5):.1f}" height="{_BAR}"'
        shapes.append(f'<rect class="time" {box}>{title}</rect>')
    for event in [event for event in events if event["kind"] == "commit"][-_MOST_COMMITS:]:
        x = _WIDTH * (event["time"] - first) / span
        title = f"<title>checkpoint at step {event['step']:,}</title>"
        shapes.append(f'<line class="commit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_BAR + 8}">{title}</line>')
    box = f'viewBox="0 0 {_WIDTH} {_BAR + 8}" preserveAspectRatio="none"'
    svg = f'<svg class="timeline" {box} role="img" aria-label="attempts over time">{"".join(shapes)}</svg>'
    ends = f'<div class="ends"><span>0</span><span>{human_duration(span)}</span></div>'
    caption = "<b>Attempts</b> <small>training, gaps between attempts, and checkpoints (green)</small>"
    return f'<figure class="wide"><figcaption>{caption}</figcaption>{svg}{ends}</figure>'


def _spans(events: list[Record]) -> list[tuple[Record, Record]]:
    """First and last event of each attempt."""
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    ends = [*(index - 1 for index in begins[1:]), len(events) - 1]
    return [(events[begin], events[end]) for begin, end in zip(begins, ends, strict=True)]
