"""From results to rows of the table: for each checkpoint and task the settings that did best, by the median over seeds
on dev. Every checkpoint has the same grid."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.after.evaluate.cell import Cell, Result
from launcher.observe.inspect.report.task_table import TableRow

_NO_FIGURE = -math.inf


@dataclass(frozen=True)
class _Choice:
    """One set of settings: its results by seed."""

    settings: dict[str, object]
    results: tuple[Result, ...]

    def values(self, metric: str) -> dict[int, float | None]:
        return {result.cell.seed: result.measured.metrics.get(metric) for result in self.results}

    def median(self, metric: str) -> float:
        """A seed without a figure (a correlation with a constant) counts as the worst."""
        return median(_NO_FIGURE if value is None else value for value in self.values(metric).values())


def rows(cells: Sequence[Cell], results: Mapping[str, Result]) -> list[TableRow]:
    """A row for each checkpoint and task of the grid, in the order of `cells`; results by key."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.checkpoint, cell.weights, cell.measure, cell.task, cell.data), []).append(
            cell
        )
    return [_row(list({cell.key: cell for cell in group}.values()), results) for group in groups.values()]


def _row(cells: Sequence[Cell], results: Mapping[str, Result]) -> TableRow:
    first = cells[0]
    choices = list(_choices(cells, results))
    there = sum(len(choice.results) for choice in choices)
    best, metric = _best(choices)
    values = best.values(metric) if best and metric else {}
    finite = [value for value in values.values() if value is not None]
    return TableRow(
        checkpoint=first.source,
        step=first.step,
        weights=first.weights,
        task=first.task,
        data=first.data,
        measure=first.measure,
        metric=metric,
        settings=_differing(best.settings, [cell.settings for cell in cells]) if best else {},
        choices=len(choices),
        median=_finite(best.median(metric)) if best and metric else None,
        lowest=min(finite, default=None),
        highest=max(finite, default=None),
        values=values,
        metrics=_medians(best) if best else {},
        cells=len(cells),
        missing=len(cells) - there,
    )


def _choices(cells: Sequence[Cell], results: Mapping[str, Result]) -> Iterator[_Choice]:
    """In the order of the grid."""
    by_settings: dict[str, list[Cell]] = {}
    for cell in cells:
        by_settings.setdefault(json.dumps(cell.settings, sort_keys=True), []).append(cell)
    for group in by_settings.values():
        yield _Choice(group[0].settings, tuple(results[cell.key] for cell in group if cell.key in results))


def _best(choices: Sequence[_Choice]) -> tuple[_Choice | None, str | None]:
    """Of the choices that the most seeds are there for, the one with the highest median; of equal ones the first."""
    most = max((len(choice.results) for choice in choices), default=0)
    if not most:
        return None, None
    complete = [choice for choice in choices if len(choice.results) == most]
    metric = next(iter(complete[0].results[0].measured.metrics), None)
    if metric is None:
        return complete[0], None
    return max(complete, key=lambda choice: choice.median(metric)), metric


def _medians(choice: _Choice) -> dict[str, float | None]:
    names = dict.fromkeys(name for result in choice.results for name in result.measured.metrics)
    return {name: _finite(choice.median(name)) for name in names}


def _differing(
    chosen: Mapping[str, object], all_settings: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """The chosen values of the settings that are not the same in the whole grid, and of the learning rate."""
    return {
        name: value
        for name, value in chosen.items()
        if name == "lr" or any(other.get(name) != value for other in all_settings)
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
