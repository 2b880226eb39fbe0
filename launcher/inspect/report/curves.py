"""Which curves a report shows: losses, accuracies, learning rate, gradient norm, throughput, waiting."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from launcher.format import human_count
from launcher.inspect.report.chart import Chart, Level, Series
from launcher.inspect.report.figures import Floats, column, rate
from launcher.run.history import History, Steps

_TOKEN_LOSSES = ("mlm_loss", "plm_loss")
_SHARES = {
    "_accuracy": "share of targets",
    "_precision": "of the tokens called replaced",
    "_recall": "of the tokens replaced",
    "_replaced": "share of tokens that were",
}


def charts(history: History, baselines: Mapping[str, float], marks: tuple[float, ...]) -> Iterator[Chart]:
    """The charts of a run; `baselines` are drawn into the loss, `marks` are steps of interruptions."""
    end = float(history.steps.numbers[-1]) + 1.0 if len(history.steps) else 1.0
    start = float(history.steps.numbers[0]) if len(history.steps) else 0.0
    chart = partial(Chart, x_end=end, marks=marks, x_start=start)
    levels = tuple(Level(name, value) for name, value in baselines.items())
    losses = _names(history.steps.fields, "_loss")
    if len(losses) > 1:
        yield chart("Loss", "weighted sum of all terms, nats", _both(history, "loss"))
    for name in losses:
        counted = levels if name in _TOKEN_LOSSES else ()
        yield chart(f"{_term(name)} loss", "nats per target", _both(history, name), levels=counted)
    evaluated = {name for record in history.evaluations for name in record}
    for suffix, unit in _SHARES.items():
        for name in _names(evaluated, suffix):
            title = f"{_term(name)} {suffix[1:]}"
            yield chart(title, unit, _both(history, name), zero=True, format=_percent)
    for name in _names(evaluated, "_similarity"):
        yield chart(f"{_term(name)} similarity", "mean of queries", _both(history, name))
    steps = history.steps
    yield chart("Learning rate", "", (_series(steps, "lr", "lr", 1),), zero=True, format=_short)
    yield chart("Gradient norm", "before clipping", (_series(steps, "grad_norm", "norm", 4),), zero=True)
    yield chart("Throughput", "tokens/s", (_throughput(steps),), zero=True, format=human_count)
    waiting, unit = (
        partial(_series, steps, "data_wait_share", "data wait", 3),
        "share of the step, slowest rank",
    )
    yield chart("Data wait", unit, (waiting(),), zero=True, format=_percent)


def _both(history: History, name: str) -> tuple[Series, Series]:
    x, y = column(history.evaluations, "step"), column(history.evaluations, name)
    return _series(history.steps, name, "training", 1), _known("held out", x, y, 2, dots=True)


def _series(steps: Steps, name: str, label: str, tone: int) -> Series:
    return _known(label, steps.numbers, steps.column(name), tone)


def _throughput(steps: Steps) -> Series:
    return _known("tokens/s", steps.numbers, rate(steps), 3)


def _known(label: str, x: Floats, y: Floats, tone: int, *, dots: bool = False) -> Series:
    """What is a number of it."""
    known = np.isfinite(y)
    if known.all():
        return Series(label, x, y, tone, dots)
    return Series(label, x[known], y[known], tone, dots)


def _term(name: str) -> str:
    return name.rpartition("_")[0].replace("_", " ").upper()


def _names(fields: Iterable[str], suffix: str) -> list[str]:
    return sorted(name for name in fields if name.endswith(suffix))


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def _short(value: float) -> str:
    return f"{value:.2g}"
