"""The cells of an evaluation grid, their stored results, and the table of results. A cell is one measurement of one
checkpoint on one task with one seed.

A result is an object in the store of results. Its key is a hash of what the result depends on: weights, measure, task,
settings and seed. So the results of a checkpoint that was moved, or of a task that was renamed, are found again.

    cells/<key>.json
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.store.base import Store, parallel_map
from launcher.observe.inspect.report.task_table import TableRow
from launcher.runtime.run.sealed import hash_json

if TYPE_CHECKING:
    from launcher.after.evaluate.model import EvaluatedModel
    from launcher.after.finetune.pretrained import LocalModel
    from launcher.after.tasks.task import Task

CELL_RULES_VERSION = 3
"""The version of our code for cells, a part of each cell's key. Raise it with every change of the code that changes the
result of a cell."""
# Packages whose versions each result records.
_VERSIONED_PACKAGES = ("maskfleet", "torch", "transformers", "sentence-transformers", "scikit-learn", "numpy")


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(_FrozenModel):
    """A measurement of one checkpoint on one task, identified by digests.

    Attributes:
        source, step: run or folder of the checkpoint, and its step, for the user.
        weights: digest of the checkpoint.
        task: name of the task, for the user.
        data: digest of the task.
        measure, settings, seed: kind, settings (plain JSON) and seed of the measurement.
    """

    source: str
    step: int | None
    weights: str
    task: str
    data: str
    measure: str
    settings: dict[str, object]
    seed: int

    @property
    def key(self) -> str:
        """Hash of all fields except those for the user, 32 hexadecimal digits."""
        return hash_json([CELL_RULES_VERSION, self.weights, self.measure, self.data, self.settings, self.seed])

    @property
    def name(self) -> str:
        """Name of the cell in errors, for the user."""
        checkpoint = self.source if self.step is None else f"{self.source} at step {self.step:,}"
        lr = f", lr {self.settings['lr']:g}" if isinstance(self.settings.get("lr"), float) else ""
        return f"{self.measure} of {checkpoint} on {self.task}{lr}, seed {self.seed}"


class CellFigures(_FrozenModel):
    """The numbers that a cell measured.

    Attributes:
        metrics: metrics by name; None for a number that is not finite (the correlation of a constant). Checkpoints are
            compared by the first metric.
        details: further results (epochs, curves).
    """

    metrics: dict[str, float | None]
    details: dict[str, object] = {}


class CellResult(_FrozenModel):
    """The result of a cell.

    Attributes:
        searched: for each split but `train`, whether the model's corpora were searched for its texts; None if unknown.
        versions: versions of the libraries that computed the result.
    """

    format: Literal[1] = 1
    cell: Cell
    measured: CellFigures
    searched: dict[str, bool] | None
    versions: dict[str, str]


@dataclass(frozen=True)
class MeasureSpec:
    """A kind of measurement on a task, sent to the process that measures checkpoints.

    Attributes:
        kind, task: kind of the measurement, and name of the task, for the user.
        measured_task: the task.
        data: digest of the task's data on the machine that planned the grid.
        settings: settings of the measurement, on which the figures depend, as plain JSON.
        compute: function that measures a checkpoint with a seed. It raises subclasses of UserError.
        seeded: whether the figures depend on the seed. If not, one seed is enough.
    """

    kind: str
    task: str
    measured_task: "Task"
    data: str
    settings: dict[str, object]
    compute: "Callable[[LocalModel, int], CellFigures]"
    seeded: bool = False


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and the measurement that computes it."""

    cell: Cell
    measure: MeasureSpec


def plan_cells(
    models: "Sequence[LocalModel | EvaluatedModel]", measures: Sequence[MeasureSpec], seeds: Sequence[int]
) -> list[PlannedCell]:
    """Return the cells of every checkpoint with every measure and, if the figures depend on the seed, with every seed;
    in the order of a table, without duplicates."""
    works = [
        PlannedCell(
            Cell(
                source=model.source,
                step=model.step,
                weights=model.digest,
                task=measure.task,
                data=measure.data,
                measure=measure.kind,
                settings=measure.settings,
                seed=seed,
            ),
            measure,
        )
        for model in models
        for measure in measures
        for seed in (seeds if measure.seeded else seeds[:1])
    ]
    return list({(work.cell.source, work.cell.key): work for work in works}.values())


def store_result(
    store: Store, planned_cell: PlannedCell, measured: CellFigures, searched_splits: dict[str, bool] | None
) -> None:
    """Store a cell's result. Raises StoreError."""
    versions = {name: metadata.version(name) for name in _VERSIONED_PACKAGES if _is_installed(name)}
    result = CellResult(cell=planned_cell.cell, measured=measured, searched=searched_splits, versions=versions)
    store.put(_result_key(planned_cell.cell.key), result.model_dump_json(indent=1).encode() + b"\n")


def _is_installed(name: str) -> bool:
    return bool(list(metadata.distributions(name=name)))


def find_results(store: Store, keys: Iterable[str] | None = None) -> dict[str, CellResult]:
    """Return the stored results by key, of all cells or only of `keys`. Objects that are not valid results are left
    out. Raises StoreError."""
    there = [entry.key for entry in store.list("cells/")]
    wanted = there if keys is None else sorted(set(there) & {_result_key(key) for key in keys})
    found: dict[str, CellResult] = {}
    for path, data in zip(wanted, parallel_map(store.get, wanted), strict=True):
        try:
            result = CellResult.model_validate_json(data)
        except ValidationError:
            continue
        if _result_key(result.cell.key) == path:
            found[result.cell.key] = result
    return found


def _result_key(cell_key: str) -> str:
    return f"cells/{cell_key}.json"


def tabulate_results(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[TableRow]:
    """Return a row for each checkpoint and task, in the order of `cells`. It shows the best settings: of those with
    results for the most seeds, those whose first metric has the highest median. `results`: by key."""
    groups: dict[tuple[object, ...], dict[str, Cell]] = {}
    for cell in cells:
        place = (cell.source, cell.step, cell.weights, cell.measure, cell.task, cell.data)
        groups.setdefault(place, {})[cell.key] = cell
    return [_table_row(list(group.values()), results) for group in groups.values()]


ResultsBySeed = dict[int, CellResult]
"""The results of one choice of settings, by seed."""


def _table_row(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> TableRow:
    """Return the row of one checkpoint and task. `cells`: its cells, for all settings and seeds."""
    first, choices = cells[0], _group_by_settings(cells, results)
    there = sum(map(len, choices))
    metric = next((name for choice in choices for one in choice.values() for name in one.measured.metrics), None)
    most = max(map(len, choices))
    complete = [choice for choice in choices if len(choice) == most]
    best = max(complete, key=lambda choice: _median_over_seeds(choice, metric)) if there else {}
    values = {seed: result.measured.metrics.get(metric) for seed, result in best.items()} if metric else {}
    finite = [value for value in values.values() if value is not None]
    names = dict.fromkeys(name for result in best.values() for name in result.measured.metrics)
    shown = next(iter(best.values()), None)
    return TableRow(
        checkpoint=first.source,
        step=first.step,
        weights=first.weights,
        task=first.task,
        data=first.data,
        measure=first.measure,
        metric=metric,
        settings=_differing_settings(shown.cell.settings, cells) if shown else {},
        choices=sum(map(bool, choices)),
        median=_finite_or_none(_median_over_seeds(best, metric)) if best else None,
        lowest=min(finite, default=None),
        highest=max(finite, default=None),
        values=values,
        metrics={name: _finite_or_none(_median_over_seeds(best, name)) for name in names},
        searched=shown.searched if shown else None,
        cells=len(cells),
        missing=len(cells) - there,
    )


def _group_by_settings(cells: Sequence[Cell], results: Mapping[str, CellResult]) -> list[ResultsBySeed]:
    """Return the results of each choice of settings, in the order of the settings' JSON: of choices with equal medians,
    every table then shows the same one."""
    found: dict[str, ResultsBySeed] = {}
    for cell in cells:
        choice = found.setdefault(json.dumps(cell.settings, sort_keys=True), {})
        if cell.key in results:
            choice[cell.seed] = results[cell.key]
    return [found[settings] for settings in sorted(found)]


def _median_over_seeds(results_by_seed: ResultsBySeed, metric: str | None) -> float:
    """Return the median of a metric over seeds. A seed without a figure counts as minus infinity."""
    values = [result.measured.metrics.get(metric or "") for result in results_by_seed.values()]
    return median(-math.inf if value is None else value for value in values)


def _differing_settings(chosen: Mapping[str, object], cells: Sequence[Cell]) -> dict[str, object]:
    """Return the chosen values of the settings that differ between `cells`, and of the learning rate."""
    return {
        name: value
        for name, value in chosen.items()
        if name == "lr" or any(cell.settings.get(name) != value for cell in cells)
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
