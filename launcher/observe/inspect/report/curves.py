"""The charts of a report: losses, accuracies, learning rate, gradient norm, throughput and data wait by step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from encoder_core.objectives.figures import AVERAGE_PREFIX, TERM_FIGURES, TERM_LOSS, TermFigure
from launcher.observe.inspect.report.chart import Chart, ChartMark, Floats, ReferenceLine, Series
from launcher.observe.inspect.report.figures import Interruption, metric_values
from launcher.output import human_count
from launcher.runtime.run.history import History
from launcher.runtime.run.metrics import BEFORE_PREFIX, TOKEN_TERMS, format_figure, metrics_shown_on
from launcher.runtime.run.step_table import Record

_TOKEN_LOSSES = tuple(term + TERM_LOSS.suffix for term in TOKEN_TERMS)  # loss fields of terms that predict tokens
_MIN_ABBREVIATED_STEPS = 20_000  # if a run is longer, numbers on the x axis are abbreviated


def report_charts(
    history: History, interruptions: Sequence[Interruption], baselines: Mapping[str, float]
) -> Iterator[Chart]:
    """Yield the charts of a run, with marks for events. `baselines`: reference lines in the charts of token losses.
    Raises StoreError."""
    steps = history.steps
    start, end = (float(steps.numbers[0]), float(steps.numbers[-1]) + 1) if len(steps) else (0.0, 1.0)
    chart = partial(Chart, x_start=start, x_end=end, marks=_event_marks(interruptions, history.events))
    if end > _MIN_ABBREVIATED_STEPS:
        chart = partial(chart, x_format=human_count)
    levels = tuple(ReferenceLine(name, value) for name, value in baselines.items())
    losses = _term_field_names(steps.fields, TERM_LOSS)
    curves = partial(_term_curves, history)
    if len(losses) > 1:
        yield chart("Loss", "weighted sum of all terms, nats", curves("loss"))
    for name in losses:
        counted = levels if name in _TOKEN_LOSSES else ()
        yield chart(TERM_LOSS.title(name), TERM_LOSS.unit, curves(name), levels=counted)
    evaluated = {name for record in history.evaluations for name in record if not name.startswith(BEFORE_PREFIX)}
    for figure in TERM_FIGURES:
        for name in _term_field_names(evaluated, figure):
            spell = partial(format_figure, figure)
            yield chart(figure.title(name), figure.unit, curves(name), zero=figure.share, format=spell)
    for metric in metrics_shown_on("curve"):
        trained = _finite_series(metric.title.lower(), steps.numbers, metric_values(metric, steps), metric.tone)
        yield chart(metric.title, metric.unit, (trained,), zero=True, format=metric.spell)


def _term_curves(history: History, name: str) -> tuple[Series, ...]:
    """Return a field's curves: in training, in evaluations, and if recorded, on the text of `evaluation.before` and
    with averaged weights."""
    steps = history.steps
    trained = steps.column(name) if name in steps.fields else None
    at, held_out, before, averaged = (
        _record_column(history.evaluations, field)
        for field in ("step", name, BEFORE_PREFIX + name, AVERAGE_PREFIX + name)
    )
    curves = [
        _finite_series("training", steps.numbers, trained, 1),
        _finite_series("held out", at, held_out, 2, dots=True),
    ]
    further = (("before", before, 3), ("average of the weights", averaged, 4))
    known = (one for one in further if np.isfinite(one[1]).any())
    return (*curves, *(_finite_series(title, at, values, tone, dots=True) for title, values, tone in known))


def _finite_series(name: str, x: Floats, y: Floats | None, tone: int, *, dots: bool = False) -> Series:
    """Return the curve of the finite values; without points if there are none."""
    known = np.isfinite(y) if y is not None else np.zeros(len(x), dtype=np.bool_)
    return Series(name, x[known], np.empty(0) if y is None else y[known], tone, dots=dots)


def _record_column(records: Sequence[Record], name: str) -> Floats:
    """Return [n] float64, a field of n records; NaN where a record has no number under `name`."""
    found = (record.get(name) for record in records)
    return np.array([one if isinstance(one, int | float) else np.nan for one in found], dtype=np.float64)


def _event_marks(interruptions: Sequence[Interruption], events: Sequence[Record]) -> tuple[ChartMark, ...]:
    marks = [
        ChartMark(float(gap.resumed_from), f"interrupted: {gap.cause}")
        for gap in interruptions
        if gap.resumed_from is not None
    ]
    for event in events:
        if event["kind"] == "straggler":
            marks.append(ChartMark(float(event["step"]), f"rank {event['rank']} held up the others"))
        elif event["kind"] == "commit_failed":
            marks.append(ChartMark(float(event["step"]), f"no checkpoint: {event.get('reason')}"))
    return tuple(sorted(marks, key=lambda mark: mark.x))


def _term_field_names(fields: Iterable[str], figure: TermFigure) -> list[str]:
    """Return the fields that hold this figure of a loss term, without those of averaged weights."""
    return sorted(name for name in fields if name.endswith(figure.suffix) and not name.startswith(AVERAGE_PREFIX))
