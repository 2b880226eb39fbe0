"""Line charts as inline SVG: no library, no external resource, colours from the page's own style.

A run has up to a million steps and a chart some hundred pixels, so a series is cut into buckets: the line is
the bucket's mean, the band behind it runs from minimum to maximum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 14, 28
_BUCKETS = 200


@dataclass(frozen=True)
class Series:
    """A curve. `tone` (1-4) picks one of the page's series colours; `dots` marks every point."""

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
class Chart:
    """One chart: curves over a shared x axis, reference levels, and x positions to mark.

    Attributes:
        title, unit: the heading, and what the y axis counts.
        x_end: right end of the x axis.
        marks: x positions of interruptions, drawn as thin vertical lines.
        x_start: left end of the x axis: a fork's first step.
        zero: whether the y axis starts at 0.
        format: how y values are written.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    x_end: float
    levels: tuple[Level, ...] = ()
    marks: tuple[float, ...] = ()
    x_start: float = 0.0
    zero: bool = False
    format: Callable[[float], str] = field(default=lambda value: f"{value:.3g}")


@dataclass(frozen=True)
class _Frame:
    """Data to pixels."""

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


def draw(chart: Chart) -> str:
    """The chart as an HTML figure; empty text if no series has a point."""
    drawn = [series for series in chart.series if len(series.x)]
    if not drawn:
        return ""
    ticks = _ticks(*_bounds(chart, drawn))
    frame = _Frame(chart.x_start, max(chart.x_end, chart.x_start + 1.0), ticks[0], ticks[-1])
    marks = (mark for mark in chart.marks if mark >= chart.x_start)
    body = [*_grid(frame, ticks, chart.format), *(_mark(frame, mark) for mark in marks)]
    body += [_level(frame, level, chart.format) for level in chart.levels]
    body += [shape for series in drawn for shape in _curve(frame, series, chart.format)]
    box, name = f"0 0 {WIDTH} {HEIGHT}", escape(chart.title)
    svg = f'<svg viewBox="{box}" role="img" aria-label="{name}">{"".join(body)}</svg>'
    keys = "".join(f'<span class="key s{series.tone}">{escape(series.name)}</span>' for series in drawn)
    legend = f'<span class="legend">{keys}</span>' if len(drawn) > 1 else ""
    heading = f"<figcaption><b>{name}</b> <small>{escape(chart.unit)}</small>{legend}</figcaption>"
    return f"<figure>{heading}{svg}</figure>"


def buckets(x: Floats, y: Floats, count: int = _BUCKETS) -> tuple[Floats, Floats, Floats, Floats]:
    """[n] points to at most `count`: mean x, and mean, minimum and maximum of y, over equal shares."""
    if len(x) <= count:
        return x, y, y, y
    starts = np.linspace(0, len(x), count, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, len(x)))
    mean_x, mean_y = np.add.reduceat(x, starts) / sizes, np.add.reduceat(y, starts) / sizes
    return mean_x, mean_y, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _bounds(chart: Chart, drawn: Sequence[Series]) -> tuple[float, float]:
    """The y range: the curves' bulk (one spike must not flatten the rest) and every level."""
    means = np.concatenate([buckets(series.x, series.y)[1] for series in drawn])
    edges = [float(means.min()), float(np.percentile(means, 99.5)), float(means[-1])]
    edges += [level.y for level in chart.levels] + ([0.0] if chart.zero else [])
    return min(edges), max(edges)


def _ticks(low: float, high: float) -> list[float]:
    """Round values that enclose [low, high]: four to seven of them."""
    span = max(high - low, abs(high) * 1e-3, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _grid(frame: _Frame, ticks: Sequence[float], label: Callable[[float], str]) -> list[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    shapes = []
    for tick in ticks:
        y = frame.y(tick)
        shapes.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(
            f'<text class="tick" x="{left - 8}" y="{y + 3.5:.1f}" text-anchor="end">{label(tick)}</text>'
        )
    for tick in _ticks(frame.x_start, frame.x_end):
        if frame.x_start <= tick <= frame.x_end:
            x = frame.x(tick)
            anchor = "end" if x > right - 20 else "middle"
            shapes.append(f'<line class="notch" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            shapes.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{tick:,.0f}</text>'
            )
    return shapes


def _mark(frame: _Frame, x: float) -> str:
    at = f"{frame.x(x):.1f}"
    title = f"<title>interrupted at step {x:,.0f}</title>"
    return f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">{title}</line>'


def _level(frame: _Frame, level: Level, label: Callable[[float], str]) -> str:
    y, right = frame.y(level.y), WIDTH - _RIGHT
    line = f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    text = f"{escape(level.name)} {label(level.y)}"
    return f'{line}<text class="level-name" x="{right}" y="{y - 5:.1f}" text-anchor="end">{text}</text>'


def _curve(frame: _Frame, series: Series, label: Callable[[float], str]) -> list[str]:
    x, mean, low, high = buckets(series.x, series.y)
    low, mean, high = (np.clip(values, frame.low, frame.high) for values in (low, mean, high))
    shapes = []
    if low is not high and not np.array_equal(low, high):
        outline = frame.points(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]))
        shapes.append(f'<polygon class="band s{series.tone}" points="{outline}"/>')
    shapes.append(f'<polyline class="line s{series.tone}" points="{frame.points(x, mean)}"/>')
    marked = zip(x, mean, strict=True) if series.dots else [(x[-1], mean[-1])]
    for at, value in marked:
        title = f"<title>{escape(series.name)} at step {at:,.0f}: {label(value)}</title>"
        place = f'cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}"'
        shapes.append(f'<circle class="dot s{series.tone}" {place} r="3">{title}</circle>')
    return shapes
