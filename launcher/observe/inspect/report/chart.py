"""Line charts as inline SVG: no library, no script, no external resource, colours from the page's own style.

A run has up to a million steps and a chart a few hundred pixels, so a series is cut into buckets. The line shows the
mean of each bucket; the band around it reaches from minimum to maximum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from launcher.observe.inspect.report.style import escape_text

Floats = NDArray[np.float64]

CHART_WIDTH, CHART_HEIGHT = 440, 216  # pixels
COLOUR_COUNT = 8  # number of colours for series in the style sheet
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 56, 14, 16, 30  # pixels
_BUCKET_COUNT = 200  # largest number of points of a drawn curve
_MAX_DRAWN_MARKS = 200  # largest number of marks in a chart, the newest ones


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
class ReferenceLine:
    """A horizontal reference line with its name."""

    name: str
    y: float


@dataclass(frozen=True)
class ChartMark:
    """An event at step `x`, and the text that describes it."""

    x: float
    text: str


def _format_three_digits(value: float) -> str:
    return f"{value:.3g}"


def _format_integer(value: float) -> str:
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
    levels: tuple[ReferenceLine, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    x_start: float = 0.0
    zero: bool = False
    format: Callable[[float], str] = field(default=_format_three_digits)
    x_format: Callable[[float], str] = field(default=_format_integer)


@dataclass(frozen=True)
class _PlotArea:
    """The mapping of data values to pixels of a chart."""

    x_start: float
    x_end: float
    low: float
    high: float

    def x_pixel(self, value: float) -> float:
        return _LEFT_MARGIN + (CHART_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN) * (value - self.x_start) / (
            self.x_end - self.x_start
        )

    def y_pixel(self, value: float) -> float:
        return _TOP_MARGIN + (CHART_HEIGHT - _TOP_MARGIN - _BOTTOM_MARGIN) * (self.high - value) / (
            self.high - self.low
        )

    def svg_points(self, xs: Floats, ys: Floats) -> str:
        return " ".join(f"{self.x_pixel(x):.1f},{self.y_pixel(y):.1f}" for x, y in zip(xs, ys, strict=True))


@dataclass(frozen=True)
class _Curve:
    """A series as it is drawn: [n] x, mean, minimum and maximum of each bucket."""

    series: Series
    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def draw_chart(chart: Chart) -> str:
    """Return the chart as an HTML figure; empty text if no series has a point."""
    curves = [_Curve(series, *bucket_points(series.x, series.y)) for series in chart.series if len(series.x)]
    if not curves:
        return ""
    ticks = _ticks(*_y_bounds(chart, curves))
    end = chart.x_end if chart.x_end > chart.x_start else chart.x_start + 1.0
    frame = _PlotArea(chart.x_start, end, ticks[0], ticks[-1])
    marks = [mark for mark in chart.marks if chart.x_start <= mark.x <= end][-_MAX_DRAWN_MARKS:]
    body = [*_grid_shapes(frame, ticks, chart), *(_mark_svg(frame, mark) for mark in marks)]
    body += [_draw_reference_line(frame, level) for level in chart.levels]
    body += [shape for curve in curves for shape in _curve_shapes(frame, curve, chart)]
    body += [_reference_line_label(frame, level, chart.format) for level in chart.levels]  # drawn over the curves
    label = escape_text(_aria_label(chart, curves))
    svg = f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
    keys = "".join(f'<span class="key s{one.series.tone}">{escape_text(one.series.name)}</span>' for one in curves)
    legend = f'<span class="legend">{keys}</span>' if len(curves) > 1 else ""
    name = escape_text(chart.title)
    heading = f"<figcaption><b>{name}</b> <small>{escape_text(chart.unit)}</small>{legend}</figcaption>"
    return f'<figure class="chart" data-name="{name}">{heading}{svg}</figure>'


def bucket_points(x: Floats, y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Reduce [n] points to at most `_BUCKET_COUNT` buckets of equal size. Return the mean of x, and the mean, minimum
    and maximum of y, of each bucket."""
    if len(x) <= _BUCKET_COUNT:
        return x, y, y, y
    starts = np.linspace(0, len(x), _BUCKET_COUNT, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    mean_x, mean_y = np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes
    return mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _y_bounds(chart: Chart, curves: Sequence[_Curve]) -> tuple[float, float]:
    """Return the range of the y axis. It contains most of the curves and bands (one spike must not flatten the rest)
    and all reference lines."""
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


def _grid_shapes(plot_area: _PlotArea, ticks: Sequence[float], chart: Chart) -> list[str]:
    left, right, bottom = _LEFT_MARGIN, CHART_WIDTH - _RIGHT_MARGIN, CHART_HEIGHT - _BOTTOM_MARGIN
    shapes = []
    for tick in ticks:
        y, spelled = plot_area.y_pixel(tick), escape_text(chart.format(tick))
        shapes.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{spelled}</text>')
    for tick in _ticks(plot_area.x_start, plot_area.x_end):
        if plot_area.x_start <= tick <= plot_area.x_end:
            x, spelled = plot_area.x_pixel(tick), escape_text(chart.x_format(tick))
            anchor = "end" if x > right - 20 else "middle"
            shapes.append(f'<line class="notch" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            shapes.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{spelled}</text>')
    return shapes


def _mark_svg(plot_area: _PlotArea, mark: ChartMark) -> str:
    at = f"{plot_area.x_pixel(mark.x):.1f}"
    title = f"<title>{escape_text(mark.text)} at step {mark.x:,.0f}</title>"
    bottom = CHART_HEIGHT - _BOTTOM_MARGIN
    return f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP_MARGIN}" y2="{bottom}">{title}</line>'


def _draw_reference_line(plot_area: _PlotArea, level: ReferenceLine) -> str:
    y = plot_area.y_pixel(level.y)
    return f'<line class="level" x1="{_LEFT_MARGIN}" x2="{CHART_WIDTH - _RIGHT_MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _reference_line_label(plot_area: _PlotArea, level: ReferenceLine, format_value: Callable[[float], str]) -> str:
    spelled = escape_text(f"{level.name} {format_value(level.y)}")
    at = f'x="{CHART_WIDTH - _RIGHT_MARGIN}" y="{plot_area.y_pixel(level.y) - 5:.1f}"'
    return f'<text class="level-name" {at} text-anchor="end">{spelled}</text>'


def _curve_shapes(plot_area: _PlotArea, curve: _Curve, chart: Chart) -> list[str]:
    tone, x = curve.series.tone, curve.x
    low, mean, high = (np.clip(values, plot_area.low, plot_area.high) for values in (curve.low, curve.mean, curve.high))
    shapes = []
    if not np.array_equal(low, high):
        outline = plot_area.svg_points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        shapes.append(f'<polygon class="band s{tone}" points="{outline}"/>')
    shapes.append(f'<polyline class="line s{tone}" points="{plot_area.svg_points(x, mean)}"/>')
    marked = zip(x, mean, strict=True) if curve.series.dots else [(x[-1], mean[-1])]
    for at, value in marked:
        value_text = f"{curve.series.name} at step {at:,.0f}: {chart.format(value)}"
        place = f'cx="{plot_area.x_pixel(at):.1f}" cy="{plot_area.y_pixel(value):.1f}"'
        shapes.append(f'<circle class="dot s{tone}" {place} r="3"><title>{escape_text(value_text)}</title></circle>')
    return shapes


def _aria_label(chart: Chart, curves: Sequence[_Curve]) -> str:
    """Return the chart in words, for screen readers."""
    ends = (f"{one.series.name} {chart.format(one.mean[-1])}, at first {chart.format(one.mean[0])}" for one in curves)
    return f"{chart.title}: {'; '.join(ends)}; up to step {chart.x_end:,.0f}"
