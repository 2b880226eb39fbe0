"""The report's section about evaluations of commits beside training: curves by step, and the newest commit's anisotropy
by layer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from launcher.observe.inspect.report.chart import TONES, Chart, Level, Series, draw
from launcher.observe.inspect.report.style import table
from launcher.runtime.recipe.evaluation import EvaluationTask
from launcher.runtime.run.evaluations import ANISOTROPY, DiagnosticResult, Evaluated, Figure, Form, named
from launcher.runtime.run.metrics import TERM_LOSS, TOKEN_TERMS
from launcher.runtime.run.step_table import Record

# A commit has one of them, which its curves show.
_LOSSES = {term + TERM_LOSS.suffix for term in (*TOKEN_TERMS, "diffusion", "denoise", "contrastive")}
_SHOWN = 12  # number of newest problems that are shown


@dataclass(frozen=True)
class _Curve:
    """The results of one task on the same data: steps, and the figures at each."""

    task: EvaluationTask
    steps: list[int]
    figures: list[tuple[Figure, ...]]

    @property
    def newest(self) -> tuple[Figure, ...]:
        return self.figures[-1]


def evaluations(found: Sequence[Evaluated], events: Sequence[Record]) -> str:
    """Return the section's HTML; empty if there are no evaluations and no problems."""
    curves = _curves(on_lineage(found, events))
    drawn = "".join(draw(chart) for curve in curves for chart in _charts(curve))
    tables = "".join(_anisotropy(curve) for curve in curves if curve.task.anisotropy)
    problems = _problems(events)
    if not curves and not problems:
        return ""
    return f'<h2>Evaluation of commits</h2><div class="charts">{drawn}</div>{tables}{problems}'


def on_lineage(found: Iterable[Evaluated], events: Sequence[Record]) -> list[Evaluated]:
    """Return evaluated commits by step, without commits after the step from which a later attempt resumed: that attempt
    repeated those steps."""
    begins = [event for event in events if event["kind"] in ("start", "resume")]

    def stands(one: Evaluated) -> bool:
        later = (int(event["step"]) for event in begins if event["attempt"] > one.commit.attempt)
        return all(one.commit.step <= step for step in later)

    kept = sorted(
        (one for one in found if stands(one)), key=lambda one: (one.commit.step, one.commit.attempt)
    )
    newest = {one.commit.step: one for one in kept}
    return list(newest.values())


def _curves(found: Sequence[Evaluated]) -> list[_Curve]:
    curves: dict[str, _Curve] = {}
    for one in found:
        for result in one.results:
            curve = curves.setdefault(_same(result), _Curve(result.cell.task, [], []))
            curve.steps.append(one.commit.step)
            curve.figures.append(result.figures)
    return list(curves.values())


def _same(result: DiagnosticResult) -> str:
    """Return a key that is equal for results of the same task on the same data."""
    return result.cell.model_copy(update={"weights": ""}).model_dump_json()


def _charts(curve: _Curve) -> Iterator[Chart]:
    task, newest = curve.task, curve.newest
    if task.heldout:
        losses = [figure for figure in newest if figure.measure in _LOSSES]
        lengths = {f"{figure.length:,} tokens": figure for figure in losses if figure.length is not None}
        sources = {figure.source: figure for figure in losses if figure.source is not None}
        yield _chart(curve, "Held-out loss by row length", "nats per target", lengths)
        if len(sources) > 1:
            yield _chart(curve, "Held-out loss by source", "nats per target", sources)
    elif task.probe:
        whole = next(figure for figure in named(newest, "accuracy") if figure.layer is None)
        (best,), majority = named(newest, "best_accuracy"), named(newest, "majority")
        levels = tuple(
            Level("largest class", figure.value) for figure in majority if figure.value is not None
        )
        kinds = {"all layers": whole, "the best on dev": best}
        yield _chart(curve, f"Linear {task.name}", "accuracy, frozen encoder", kinds, levels)
    elif task.similarity:
        kinds = _last_layer(newest, "spearman")
        yield _chart(curve, task.name.capitalize(), "Spearman of cosine, last layer", kinds)
    else:
        for measure, title in (("cosine", "Cosine of random pairs"), ("iso_score", "IsoScore")):
            yield _chart(curve, title, "last layer", _last_layer(newest, measure))


def _last_layer(figures: Sequence[Figure], measure: str) -> dict[str, Figure]:
    found = named(figures, measure)
    last = max((figure.layer or 0 for figure in found), default=0)
    return {f"{figure.pooling}, {figure.form}": figure for figure in found if figure.layer == last}


def _chart(
    curve: _Curve, title: str, unit: str, kinds: Mapping[str, Figure], levels: tuple[Level, ...] = ()
) -> Chart:
    """Return a line for each of `kinds`, the last ones if there are too many."""
    shown = list(kinds.items())[-TONES:]
    series = tuple(_series(curve, name, kind, tone) for tone, (name, kind) in enumerate(shown, start=1))
    return Chart(title, unit, series, x_end=float(curve.steps[-1]), levels=levels)


def _series(curve: _Curve, name: str, kind: Figure, tone: int) -> Series:
    points = [
        (step, figure.value)
        for step, figures in zip(curve.steps, curve.figures, strict=True)
        for figure in figures
        if figure.of == kind.of and figure.value is not None
    ]
    values = np.array(points, dtype=np.float64).reshape(-1, 2)
    return Series(name, values[:, 0], values[:, 1], tone, dots=True)


def _anisotropy(curve: _Curve) -> str:
    """Return the table of the newest commit's anisotropy, by layer and pooling."""
    values = {
        (figure.layer, figure.pooling, figure.measure, figure.form): figure.value for figure in curve.newest
    }
    places = dict.fromkeys((figure.layer, figure.pooling) for figure in curve.newest)
    columns: list[tuple[str, Form]] = [
        (measure, form)
        for measure in ("cosine", "iso_score", "effective_rank")
        for form in ("raw", "whitened")
    ]
    rows = [
        (str(layer), str(pooling), *(_number(values.get((layer, pooling, *column))) for column in columns))
        for layer, pooling in places
    ]
    heads = ("layer", "pooling", *(f"{measure.replace('_', ' ')}, {form}" for measure, form in columns))
    title = f"<h2>Anisotropy at step {curve.steps[-1]:,}</h2>"
    return f'{title}<p class="soft">{escape(ANISOTROPY)}</p>' + table(heads, rows, 2)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _problems(events: Sequence[Record]) -> str:
    """Return the table of evaluations that failed, and of commits that were not evaluated."""
    lines = []
    for event in events:
        if event["kind"] == "evaluation_failed":
            lines.append((f"{event['step']:,}", f"{event['what']}: {event['reason']}"))
        elif event["kind"] == "evaluation_skipped":
            lines += [(f"{step:,}", f"not evaluated: {event['reason']}") for step in event["steps"]]
    if not lines:
        return ""
    count = f'<p class="soft">{len(lines):,} in all; the newest:</p>' if len(lines) > _SHOWN else ""
    return "<h2>Not evaluated</h2>" + count + table(("step", "why"), lines[-_SHOWN:], 2)
