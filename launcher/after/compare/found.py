"""Reads the existing results of a comparison: curves and figures of every run, and their spread over seeds. No run is
trained or measured here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from checkpoints.listing import committed
from launcher.after.compare.arguments import Unit
from launcher.after.compare.measure import common_rows, known
from launcher.after.compare.place import Comparison
from launcher.after.compare.plan import Arm
from launcher.after.compare.training import is_complete
from launcher.runtime.run.evaluations import evaluated
from launcher.runtime.run.history import History, read_history
from launcher.runtime.run.record import Run

Floats = NDArray[np.float64]
_FIGURES = ("_loss", "_accuracy")
_COMMON = "common "
"""The prefix of names of figures that were measured under the first recipe's masks."""


@dataclass(frozen=True)
class Spread:
    """The values of a figure, by seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def low(self) -> float:
        return min(self.values.values())

    @property
    def high(self) -> float:
        return max(self.values.values())

    def less(self, other: "Spread") -> "Spread | None":
        """Return the differences of the seeds that both have; None if there are none."""
        both = self.values.keys() & other.values.keys()
        return (
            Spread({seed: self.values[seed] - other.values[seed] for seed in sorted(both)}) if both else None
        )


@dataclass(frozen=True)
class FoundRun:
    """The present state of a run.

    Attributes:
        step: step of its newest checkpoint.
        complete: whether this is its last step.
        figures: figures of the last checkpoint of a complete run, by name.
    """

    run: Run
    step: int
    complete: bool
    history: History
    figures: Mapping[str, float]

    def held_out(self, name: str) -> dict[int, float]:
        """Return a figure of the held-out text by step."""
        return {
            int(record["step"]): float(record[name])
            for record in self.history.evaluations
            if record.get(name) is not None
        }

    def trained(self, name: str) -> dict[int, float]:
        """Return a loss of the training steps by steps done."""
        steps = self.history.steps
        if name not in steps.fields:
            return {}
        values = steps.column(name)
        return {int(step) + 1: float(value) for step, value in zip(steps.numbers, values, strict=True)}


@dataclass(frozen=True)
class ComparisonState:
    """Everything of a comparison. `runs`: by label, then by seed."""

    comparison: Comparison
    runs: Mapping[str, Mapping[int, FoundRun]]

    @property
    def complete(self) -> list[FoundRun]:
        """Runs that are trained to their end."""
        return [one for runs in self.runs.values() for one in runs.values() if one.complete]

    def spread(self, label: str, figure: str) -> Spread | None:
        """Return a figure of the complete runs of an arm; None if none has it."""
        values = {
            seed: one.figures[figure] for seed, one in self.runs[label].items() if figure in one.figures
        }
        return Spread(values) if values else None

    @property
    def figures(self) -> list[str]:
        """Names of all figures, those of hidden tokens first."""
        names = {name: None for runs in self.runs.values() for one in runs.values() for name in one.figures}
        return sorted(names, key=lambda name: (not name.startswith(_COMMON), list(names).index(name)))

    @property
    def losses(self) -> list[str]:
        """Names of the losses that runs record."""
        names = [name for runs in self.runs.values() for one in runs.values() for name in _losses(one)]
        return list(dict.fromkeys(names))

    def curve(self, arm: Arm, points: "Points", unit: Unit) -> "CurveOverSeeds":
        """Return the mean over seeds along tokens or FLOPs. `points`: what of a run is drawn, by step."""
        of_runs = [found for one in self.runs[arm.label].values() if (found := points(one))]
        steps = sorted({step for found in of_runs for step in found})
        values = [
            [found[step] for found in of_runs if np.isfinite(found.get(step, np.nan))] for step in steps
        ]
        kept = [(step, own) for step, own in zip(steps, values, strict=True) if own]
        cost = arm.cost
        return CurveOverSeeds(
            np.array([cost.of(unit, step) for step, _ in kept], dtype=np.float64),
            *(np.array([pick(own) for _, own in kept], dtype=np.float64) for pick in (mean, min, max)),
        )


Points = Callable[[FoundRun], dict[int, float]]


@dataclass(frozen=True)
class CurveOverSeeds:
    """A curve over seeds, [n] float64 each: positions, the mean over the present seeds, and the extremes."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def read_found(comparison: Comparison) -> ComparisonState:
    """Read the present state of a comparison. Raises StoreError, RunError."""
    runs = {arm.label: dict(_runs(comparison, arm.label)) for arm in comparison.arms}
    return ComparisonState(comparison, runs)


def _runs(comparison: Comparison, label: str) -> Iterator[tuple[int, FoundRun]]:
    for seed in comparison.seeds:
        run = comparison.run(label, seed)
        if run is not None:
            marks, complete = committed(run.store), is_complete(run)
            history = read_history(run.store)
            figures = dict(_figures(comparison, run, history)) if complete else {}
            yield seed, FoundRun(run, marks[0].step if marks else 0, complete, history, figures)


def _figures(comparison: Comparison, run: Run, history: History) -> Iterator[tuple[str, float]]:
    first = comparison.run(comparison.arms[0].label, comparison.seeds[0])
    rows = None if first is None else common_rows(first)
    if rows is not None:
        for name, value in (known(run, rows, comparison.store) or {}).items():
            yield f"{_COMMON}{name}", value
    last = history.evaluations[-1] if history.evaluations else {}
    for name, value in last.items():
        if name.endswith(_FIGURES) and value is not None:
            yield name, float(value)
    yield from _measured(run)


def _measured(run: Run) -> Iterator[tuple[str, float]]:
    """Yield the figures of the last checkpoint on the recipe's tasks: those of all layers together, or of the last."""
    step, tasks = committed(run.store)[0].step, run.recipe.evaluation.tasks
    for item in evaluated(run.store):
        for result in item.results if item.commit.step == step else ():
            for figure in result.figures if result.cell.task in tasks else ():
                whole = figure.layer in (None, run.recipe.model.layers)
                if (
                    figure.value is None
                    or not whole
                    or result.cell.task.heldout
                    or result.cell.task.anisotropy
                ):
                    continue
                parts = (result.cell.task.name, figure.measure, figure.pooling, figure.form)
                layer = "" if figure.layer is None else " (last layer)"
                yield " ".join(part for part in parts if part) + layer, figure.value


def _losses(one: FoundRun) -> list[str]:
    recorded = {name for record in one.history.evaluations for name in record} | one.history.steps.fields
    return sorted(name for name in recorded if name.endswith("_loss"))
