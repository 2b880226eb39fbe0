"""The charts of a report: losses, accuracies, learning rate, gradient norm, throughput and data wait, for one run or
for several over each other. Also the timeline: a bar of the attempts and gaps over the wall time, with a tick for every
checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np

from launcher.observe.inspect.report.chart import Chart, ChartMark, Floats, Level, Series
from launcher.observe.inspect.report.figures import Account, Interruption, column
from launcher.observe.inspect.report.summary import Axis, Summary
from launcher.output import human_count, human_duration
from launcher.runtime.run.metrics import TERM, TERM_LOSS, TOKEN_TERMS, TermMetric, shown_on
from launcher.runtime.run.step_table import Record

_TOKEN_LOSSES = tuple(term + TERM_LOSS.suffix for term in TOKEN_TERMS)
_MANY = 20_000  # number of steps above which numbers on the axis are abbreviated


def _hours(value: float) -> str:
    return f"{value:.3g} h"


def charts(account: Account, baselines: Mapping[str, float], axis: Axis = "steps") -> Iterator[Chart]:
    """Yield the charts of a run. `baselines` are levels in the charts of token losses; events are marks."""
    summary = account.summary
    chart = partial(_chart, [summary], axis, marks=_marks(account, axis))
    levels = tuple(Level(name, value) for name, value in baselines.items())
    losses = _names(summary.fields, TERM_LOSS)
    both = partial(_both, account, axis)
    if len(losses) > 1:
        yield chart("Loss", "weighted sum of all terms, nats", both("loss"))
    for name in losses:
        counted = levels if name in _TOKEN_LOSSES else ()
        yield chart(TERM_LOSS.title(name), TERM_LOSS.unit, both(name), levels=counted)
    evaluated = {name for record in account.evaluations for name in record}
    for figure in TERM:
        for name in _names(evaluated, figure):
            yield chart(figure.title(name), figure.unit, both(name), zero=figure.share, format=figure.spell)
    for metric in shown_on("curve"):
        series = _trained(summary, metric.name, axis, metric.title.lower(), metric.tone)
        yield chart(metric.title, metric.unit, (series,), zero=True, format=metric.spell)


@dataclass(frozen=True)
class ComparedRun:
    """One of several runs in a comparison: its name on the page, its colour, and its account."""

    name: str
    tone: int
    account: Account


def compared(runs: Sequence[ComparedRun], axis: Axis) -> Iterator[Chart]:
    """Yield charts with the curves of several runs over each other: two for each loss, in training and held out, and
    one for each further figure."""
    chart = partial(_chart, [run.account.summary for run in runs], axis)
    recorded = {name for run in runs for name in run.account.summary.fields}
    evaluated = {name for run in runs for record in run.account.evaluations for name in record}
    for name in _names(recorded | evaluated, TERM_LOSS):
        held_out = tuple(_held_out(run.account, name, axis, run.name, run.tone) for run in runs)
        yield chart(f"{TERM_LOSS.title(name)}, held out", TERM_LOSS.unit, held_out)
        trained = tuple(_trained(run.account.summary, name, axis, run.name, run.tone) for run in runs)
        yield chart(f"{TERM_LOSS.title(name)}, training", TERM_LOSS.unit, trained)
    for figure in TERM:
        for name in _names(evaluated, figure):
            held_out = tuple(_held_out(run.account, name, axis, run.name, run.tone) for run in runs)
            title = f"{figure.title(name)}, held out"
            yield chart(title, figure.unit, held_out, zero=figure.share, format=figure.spell)
    for metric in shown_on("curve"):
        series = tuple(_trained(run.account.summary, metric.name, axis, run.name, run.tone) for run in runs)
        yield chart(metric.title, metric.unit, series, zero=True, format=metric.spell)


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
    """Return a chart whose x axis covers the steps of all runs."""
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
    """Return the text of a mark for an event; empty if it gets none. Interruptions have marks of their own."""
    if event["kind"] == "straggler":
        return f"rank {event['rank']} held up the others"
    if event["kind"] == "commit_failed":
        return f"no checkpoint: {event.get('reason')}"
    return ""


def _names(fields: Iterable[str], figure: TermMetric) -> list[str]:
    return sorted(name for name in fields if name.endswith(figure.suffix))


def _whole(value: float) -> str:
    return f"{value:,.0f}"


_WIDTH, _BAR = 1060, 26
_MOST_COMMITS = 1000  # number of newest checkpoints that are drawn
_BEGINS = ("start", "resume")


def draw_timeline(told: Sequence[Record]) -> str:
    """Return an SVG figure of a run's attempts over time; empty text if there are not two events at different times."""
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
    """Return the first and the last event of each attempt."""
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    ends = [*(index - 1 for index in begins[1:]), len(events) - 1]
    return [(events[begin], events[end]) for begin, end in zip(begins, ends, strict=True)]
