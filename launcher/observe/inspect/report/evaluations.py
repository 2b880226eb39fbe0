"""The report's section about evaluations of committed checkpoints: a chart for each measure of each task, by step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from encoder_core.objectives.figures import TERM_LOSS
from launcher.observe.inspect.report.chart import COLOUR_COUNT, Chart, ReferenceLine, Series, draw_chart
from launcher.runtime.recipe.parts import EvaluationTask
from launcher.runtime.run.evaluations import DiagnosticResult, EvaluatedCommit, Figure, select_measure
from launcher.runtime.run.step_table import Record


@dataclass(frozen=True)
class _TaskResults:
    """The results of one task on the same data: steps, and the figures at each."""

    task: EvaluationTask
    steps: list[int]
    figures: list[tuple[Figure, ...]]


def evaluations_html(evaluations: Sequence[EvaluatedCommit], events: Sequence[Record]) -> str:
    """Return the section's HTML; empty if there are no evaluations."""
    curves: dict[str, _TaskResults] = {}
    for one in select_on_lineage(evaluations, events):
        for result in one.results:
            curve = curves.setdefault(_task_key(result), _TaskResults(result.cell.task, [], []))
            curve.steps.append(one.commit.step)
            curve.figures.append(result.figures)
    if not curves:
        return ""
    drawn = "".join(draw_chart(chart) for curve in curves.values() for chart in _measure_charts(curve))
    return f'<h2>Evaluation of commits</h2><div class="charts">{drawn}</div>'


def select_on_lineage(found: Iterable[EvaluatedCommit], events: Sequence[Record]) -> list[EvaluatedCommit]:
    """Return evaluated commits by step, without commits after the step from which a later attempt resumed: that attempt
    repeated those steps."""
    begins = [event for event in events if event["kind"] in ("start", "resume")]

    def is_current(evaluation: EvaluatedCommit) -> bool:
        later = (int(event["step"]) for event in begins if event["attempt"] > evaluation.commit.attempt)
        return all(evaluation.commit.step <= step for step in later)

    current = sorted(filter(is_current, found), key=lambda one: (one.commit.step, one.commit.attempt))
    return list({one.commit.step: one for one in current}.values())


def _task_key(result: DiagnosticResult) -> str:
    """Return a key that is equal for results of the same task on the same data."""
    return result.cell.model_copy(update={"weights": ""}).model_dump_json()


def _measure_charts(curve: _TaskResults) -> Iterator[Chart]:
    """Yield a chart for each measure, with its figures for all layers together, or else for the last layer."""
    task, newest = curve.task, curve.figures[-1]
    majority = [figure.value for figure in select_measure(newest, "majority") if figure.value is not None]
    levels = tuple(ReferenceLine("largest class", value) for value in majority)
    for measure in dict.fromkeys(figure.measure for figure in newest):
        if (task.heldout and not measure.endswith(TERM_LOSS.suffix)) or measure == "majority":
            continue
        figures = select_measure(newest, measure)
        last = max((figure.layer or 0 for figure in figures), default=0)
        whole = [figure for figure in figures if figure.layer is None]
        lines = {_figure_name(figure): figure for figure in whole or figures if figure.layer in (None, last)}
        series = tuple(
            _figure_series(curve, name, figure, tone)
            for tone, (name, figure) in enumerate(list(lines.items())[-COLOUR_COUNT:], start=1)
        )
        title = f"{task.name}: {measure.replace('_', ' ')}"
        unit = "nats per target" if task.heldout else "last layer" if not whole else "all layers"
        yield Chart(title, unit, series, x_end=float(curve.steps[-1]), levels=levels)


def _figure_name(figure: Figure) -> str:
    """Return what distinguishes a figure from others of its measure: length, source and pooling."""
    length = f"{figure.length:,} tokens" if figure.length is not None else None
    parts = (length, figure.source, figure.pooling)
    return ", ".join(part for part in parts if part is not None) or figure.measure.replace("_", " ")


def _figure_series(curve: _TaskResults, name: str, shown_figure: Figure, tone: int) -> Series:
    points = [
        (step, figure.value)
        for step, figures in zip(curve.steps, curve.figures, strict=True)
        for figure in figures
        if figure.conditions == shown_figure.conditions and figure.value is not None
    ]
    values = np.array(points, dtype=np.float64).reshape(-1, 2)
    return Series(name, values[:, 0], values[:, 1], tone, dots=True)
