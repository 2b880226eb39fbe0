"""Line charts as inline SVG: no library, no script, no external resource, colours from the page's own style.

A run has up to a million steps and a chart a few hundred pixels, so a series is cut into buckets. The line shows the
mean of each bucket; the band around it reaches from minimum to maximum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from launcher.observe.inspect.report.style import text

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 440, 216
COLOUR_COUNT = 8  # number of colours for series in the style sheet
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 16, 30
_BUCKETS = 200
_MAX_DRAWN_MARKS = 200  # number of newest marks that are drawn


@dataclass(frozen=True)
class Series:
    """A curve of a chart.

    Attributes:
        name: name in the legend.
        x, y: [n] points.
        tone: number (1-8) of the page's colour for series.
        dots: whether every point is marked.
    """

    name: str
    x: Floats
    y: Floats
    tone: int = 1
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal reference line with its name."""

    name: str
    y: float


@dataclass(frozen=True)
class ChartMark:
    """A text about something that happened at `x`."""

    x: float
    text: str


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Chart:
    """One chart: curves over a shared x axis, reference levels, and x positions to mark.

    Attributes:
        title, unit: heading, and unit of the y axis.
        x_end: right end of the x axis.
        marks: events, drawn as thin vertical lines.
        x_start: left end of the x axis; for a fork, its first step.
        zero: whether the y axis starts at 0.
        format: function that formats a y value.
        x_format: function that formats numbers on the x axis.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    x_end: float
    levels: tuple[Level, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    x_start: float = 0.0
    zero: bool = False
    format: Callable[[float], str] = field(default=_three_digits)
    x_format: Callable[[float], str] = field(default=_whole)


@dataclass(frozen=True)
class _PlotArea:
    """The map from data to pixels."""

    x_start: float
    x_end: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - self.x_start) / (self.x_end - self.x_start)

    def y(self, value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (self.high - value) / (self.high - self.low)

    def points(self, xs: Floats, ys: Floats) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))


@dataclass(frozen=True)
class _Curve:
    """A series as it is drawn: [n] x, mean, minimum and maximum of each bucket."""

    series: Series
    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def draw(chart: Chart) -> str:
    """Return the chart as an HTML figure; empty text if no series has a point."""
    curves = [_Curve(series, *buckets(series.x, series.y)) for series in chart.series if len(series.x)]
    if not curves:
        return ""
    ticks = _ticks(*_bounds(chart, curves))
    end = chart.x_end if chart.x_end > chart.x_start else chart.x_start + 1.0
    frame = _PlotArea(chart.x_start, end, ticks[0], ticks[-1])
    marks = [mark for mark in chart.marks if chart.x_start <= mark.x <= end][-_MAX_DRAWN_MARKS:]
    body = [*_grid(frame, ticks, chart), *(_mark(frame, mark) for mark in marks)]
    body += [_draw_reference_line(frame, level) for level in chart.levels]
    body += [shape for curve in curves for shape in _curve(frame, curve, chart)]
    body += [_level_name(frame, level, chart.format) for level in chart.levels]  # drawn over the curves
    label = text(_label(chart, curves))
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
    keys = "".join(f'<span class="key s{one.series.tone}">{text(one.series.name)}</span>' for one in curves)
    legend = f'<span class="legend">{keys}</span>' if len(curves) > 1 else ""
    name = text(chart.title)
    heading = f"<figcaption><b>{name}</b> <small>{text(chart.unit)}</small>{legend}</figcaption>"
    return f'<figure class="chart" data-name="{name}">{heading}{svg}</figure>'


def buckets(x: Floats, y: Floats, count: int = _BUCKETS) -> tuple[Floats, Floats, Floats, Floats]:
    """Reduce [n] points to at most `count` buckets of equal share. Return the mean of x, and the mean, minimum and
    maximum of y."""
    if len(x) <= count:
        return x, y, y, y
    starts = np.linspace(0, len(x), count, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    mean_x, mean_y = np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes
    return mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _bounds(chart: Chart, curves: Sequence[_Curve]) -> tuple[float, float]:
    """Return the y range. It holds most of the curves and bands (one spike must not flatten the rest) and all
    levels."""
    means = np.concatenate([one.mean for one in curves])
    edges = [float(means.min()), float(np.percentile(means, 99.5)), *(float(one.mean[-1]) for one in curves)]
    edges += [float(np.median(band)) for one in curves for band in (one.low, one.high)]
    edges += [level.y for level in chart.levels] + ([0.0] if chart.zero else [])
    return min(edges), max(edges)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to seven round values that enclose [low, high]."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _grid(frame: _PlotArea, ticks: Sequence[float], chart: Chart) -> list[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    shapes = []
    for tick in ticks:
        y, spelled = frame.y(tick), text(chart.format(tick))
        shapes.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(
            f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{spelled}</text>'
        )
    for tick in _ticks(frame.x_start, frame.x_end):
        if frame.x_start <= tick <= frame.x_end:
            x, spelled = frame.x(tick), text(chart.x_format(tick))
            anchor = "end" if x > right - 20 else "middle"
            shapes.append(f'<line class="notch" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            shapes.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{spelled}</text>'
            )
    return shapes


def _mark(frame: _PlotArea, mark: ChartMark) -> str:
    at = f"{frame.x(mark.x):.1f}"
    title = f"<title>{text(mark.text)} at step {mark.x:,.0f}</title>"
    return f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">{title}</line>'


def _draw_reference_line(frame: _PlotArea, level: Level) -> str:
    y = frame.y(level.y)
    return f'<line class="level" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _level_name(frame: _PlotArea, level: Level, label: Callable[[float], str]) -> str:
    spelled = text(f"{level.name} {label(level.y)}")
    at = f'x="{WIDTH - _RIGHT}" y="{frame.y(level.y) - 5:.1f}"'
    return f'<text class="level-name" {at} text-anchor="end">{spelled}</text>'


def _curve(frame: _PlotArea, one: _Curve, chart: Chart) -> list[str]:
    tone, x = one.series.tone, one.x
    low, mean, high = (np.clip(values, frame.low, frame.high) for values in (one.low, one.mean, one.high))
    shapes = []
    if not np.array_equal(low, high):
        outline = frame.points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        shapes.append(f'<polygon class="band s{tone}" points="{outline}"/>')
    shapes.append(f'<polyline class="line s{tone}" points="{frame.points(x, mean)}"/>')
    marked = zip(x, mean, strict=True) if one.series.dots else [(x[-1], mean[-1])]
    for at, value in marked:
        value_text = f"{one.series.name} at step {at:,.0f}: {chart.format(value)}"
        place = f'cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}"'
        shapes.append(f'<circle class="dot s{tone}" {place} r="3"><title>{text(value_text)}</title></circle>')
    return shapes


def _label(chart: Chart, curves: Sequence[_Curve]) -> str:
    """Return the chart in words, for screen readers."""
    ends = (
        f"{one.series.name} {chart.format(one.mean[-1])}, at first {chart.format(one.mean[0])}"
        for one in curves
    )
    return f"{chart.title}: {'; '.join(ends)}; up to step {chart.x_end:,.0f}"
