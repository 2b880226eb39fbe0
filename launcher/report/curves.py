"""Which curves a report shows: loss, accuracy, learning rate, gradient norm, throughput, waiting."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from launcher.history import History, Record
from launcher.human import human_count
from launcher.report.chart import Chart, Level, Series
from launcher.report.figures import column


def charts(history: History, baselines: Mapping[str, float], marks: tuple[float, ...]) -> Iterator[Chart]:
    """The charts of a run; `baselines` are drawn into the loss, `marks` are steps of interruptions."""
    end = float(history.steps[-1]["step"] + 1) if history.steps else 1.0
    chart = partial(Chart, x_end=end, marks=marks)
    levels = tuple(Level(name, value) for name, value in baselines.items())
    yield chart("Loss", "nats per target", _both(history, "loss"), levels=levels)
    for name in _names(history.evaluations, "_accuracy"):
        title = f"{name.removesuffix('_accuracy').upper()} accuracy"
        yield chart(title, "share of targets", _both(history, name), zero=True, format=_percent)
    steps = history.steps
    yield chart("Learning rate", "", (_series(steps, "lr", "lr", 1),), zero=True, format=_short)
    yield chart("Gradient norm", "before clipping", (_series(steps, "grad_norm", "norm", 4),), zero=True)
    yield chart("Throughput", "tokens/s", (_rate(steps),), zero=True, format=human_count)
    wait = (_series(steps, "data_wait_share", "data wait", 3),)
    yield chart("Data wait", "share of the step, slowest rank", wait, zero=True, format=_percent)


def _both(history: History, name: str) -> tuple[Series, Series]:
    heldout = _series(history.evaluations, name, "held out", 2, dots=True)
    return _series(history.steps, name, "training", 1), heldout


def _series(records: Sequence[Record], name: str, label: str, tone: int, *, dots: bool = False) -> Series:
    x, y = column(records, "step"), column(records, name)
    known = np.isfinite(y)
    return Series(label, x[known], y[known], tone, dots)


def _rate(steps: Sequence[Record]) -> Series:
    rate = column(steps, "tokens") / np.maximum(column(steps, "seconds"), 1e-9)
    return Series("tokens/s", column(steps, "step"), rate, 3)


def _names(records: Sequence[Record], suffix: str) -> list[str]:
    return sorted({name for record in records for name in record if name.endswith(suffix)})


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _short(value: float) -> str:
    return f"{value:.2g}"
