"""An evaluation: plans a grid of cells, computes those that have no result yet, and makes the table.

The table has, for each checkpoint and task, the settings that did best by the median over seeds on dev. Every
checkpoint has the same grid.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from data_service.store.errors import StoreError
from launcher.after.evaluate.cell import Cell, CellWork, GridRecord, Measure, Result, Results
from launcher.after.evaluate.compute_cell import CellFailure, CellResources, Ended, Waiting
from launcher.after.evaluate.grid import GridRunner, cluster
from launcher.after.finetune.pretrained import LocalModel
from launcher.observe.inspect.report.task_table import TableRow

_NO_FIGURE = -math.inf


@dataclass(frozen=True)
class _Choice:
    """The results of one choice of settings, by seed."""

    settings: dict[str, object]
    results: tuple[Result, ...]

    def values(self, metric: str) -> dict[int, float | None]:
        return {result.cell.seed: result.measured.metrics.get(metric) for result in self.results}

    def median(self, metric: str) -> float:
        """Return the median over seeds. A seed without a figure (a correlation with a constant) counts as the worst."""
        return median(_NO_FIGURE if value is None else value for value in self.values(metric).values())


def rows(cells: Sequence[Cell], results: Mapping[str, Result]) -> list[TableRow]:
    """Return a row for each checkpoint and task of the grid, in the order of `cells`; results by key."""
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
    """Yield the choices of settings, in the order of the grid."""
    by_settings: dict[str, list[Cell]] = {}
    for cell in cells:
        by_settings.setdefault(json.dumps(cell.settings, sort_keys=True), []).append(cell)
    for group in by_settings.values():
        yield _Choice(group[0].settings, tuple(results[cell.key] for cell in group if cell.key in results))


def _best(choices: Sequence[_Choice]) -> tuple[_Choice | None, str | None]:
    """Return the choice with the highest median among those with the most seeds; of equal ones, the first."""
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
    """Return the chosen values of the settings that are not the same in the whole grid, and of the learning rate."""
    return {
        name: value
        for name, value in chosen.items()
        if name == "lr" or any(other.get(name) != value for other in all_settings)
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class KnownModel(Protocol):
    """A model by its digest, with where it was found; see `LocalModel`."""

    @property
    def source(self) -> str: ...

    @property
    def step(self) -> int | None: ...

    @property
    def digest(self) -> str: ...


class GridEvaluation:
    """The evaluation of the cells of `works`, whose results are in `results`.

    Attributes:
        before: number of cells that had a result at the start.
        computed: number of cells that this command has computed.
        failures: failures of the cells that ended without a result.
        trouble: why no further cells were started, if the store stopped answering.
    """

    def __init__(self, results: Results, suite: str, works: Sequence[CellWork]) -> None:
        """Find the cells that have a result. Raises StoreError and its subclasses."""
        self._results, self._suite = results, suite
        self._works = list({work.cell.key: work for work in works}.values())
        self._cells = [work.cell for work in works]
        self._found: dict[str, Result] = results.find_all(work.cell.key for work in self._works)
        self.before, self.computed = len(self._found), 0
        self.failures: list[CellFailure] = []
        self.trouble: StoreError | None = None

    @property
    def missing(self) -> list[CellWork]:
        """The cells that had no result at the start."""
        return [work for work in self._works if work.cell.key not in self._found]

    @property
    def needed(self) -> set[str]:
        """The digests of the models in the missing cells."""
        return {work.cell.weights for work in self.missing}

    def under_other_rules(self) -> Mapping[int, int]:
        """Return how many of the missing cells have results of other versions of the rules, which are not used."""
        return self._results.under_other_rules(work.cell.key for work in self.missing)

    def compute(self, models: Sequence[LocalModel], share: CellResources) -> Iterator[Ended | Waiting]:
        """Compute the missing cells on the Ray cluster, and store each result at once. Yield each cell as it ends.

        `models`: the models whose digests are `needed`, and possibly others.

        Raises:
            StoreError: if the store cannot be written.
            TryAgain: if there is no cluster, or Ray has died.
            OptionError: if a cell needs more than any machine has.
        """
        self._results.keep_grid(GridRecord(suite=self._suite, cells=tuple(self._cells)))
        missing = self.missing
        if not missing:
            return
        folders = {model.digest: model for model in models if model.digest in self.needed}
        with cluster(share, len(missing)) as (remote, settled):
            grid = GridRunner(self._results, settled, models=folders, remote=remote)
            for event in grid.run(missing):
                if isinstance(event, Ended):
                    self.computed += event.computed and event.failure is None
                    self.failures += [event.failure] if event.failure else []
                yield event
            self.trouble = grid.trouble

    def table(self) -> list[TableRow]:
        """Return the table of all present results. Raises StoreError and its subclasses."""
        return rows(self._cells, self._results.find_all(cell.key for cell in self._cells))


def plan(models: Sequence[KnownModel], measures: Sequence[Measure], seeds: Sequence[int]) -> list[CellWork]:
    """Return the cells of every checkpoint with every measure, and with every seed if figures depend on it; in the
    order of a table."""
    return [
        CellWork(_cell(model, measure, seed), measure)
        for model in models
        for measure in measures
        for seed in (seeds if measure.seeded else seeds[:1])
    ]


def _cell(model: KnownModel, measure: Measure, seed: int) -> Cell:
    return Cell(
        source=model.source,
        step=model.step,
        weights=model.digest,
        task=measure.task,
        data=measure.data,
        measure=measure.kind,
        settings=measure.settings,
        seed=seed,
    )


def recorded(
    results: Results, sources: Sequence[str], steps: Sequence[int] | None, suite: str | None
) -> list[TableRow]:
    """Return the table of the recorded grids. It only needs results: checkpoints and data may have been deleted.

    `sources` and `steps` restrict it to these checkpoints, `suite` to the grids of one suite.
    """
    cells = [
        cell
        for grid in results.grids()
        for cell in grid.cells
        if suite in (None, grid.suite)
        and (not sources or cell.source in sources)
        and (not steps or cell.step is None or cell.step in steps)
    ]
    return rows(cells, results.find_all(cell.key for cell in cells))
