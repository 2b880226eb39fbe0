"""What was measured so far, read back from the runs and the grid; nothing is computed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean

from data_service.store.open import open_store
from launcher.diagnose.results import Evaluated, evaluated
from launcher.evaluate.cell import Result
from launcher.evaluate.results import Results
from launcher.inspect.baselines import KEY, Baselines
from launcher.run.history import History, read_history
from launcher.run.log import token_loss
from launcher.run.record import RECORD, Run, open_run

from .measuring import DOMAIN, domain_measures
from .place import Place
from .pretraining import is_complete
from .published import Published, read_published


@dataclass(frozen=True)
class Seen:
    """A figure of one or several seeds, by seed."""

    values: Mapping[int, float]

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def low(self) -> float:
        return min(self.values.values())

    @property
    def high(self) -> float:
        return max(self.values.values())

    def less(self, other: "Seen") -> "Seen":
        """The differences of the seeds that both have."""
        both = self.values.keys() & other.values.keys()
        return Seen({seed: self.values[seed] - other.values[seed] for seed in sorted(both)})


@dataclass(frozen=True)
class Trained:
    """A run that was trained to its end.

    Attributes:
        losses: held-out, in nats a hidden token, by step.
        frozen: by step (0: the beginning), then by what was measured.
        counted: losses by counting; None while they were not computed.
    """

    run: Run
    history: History
    frozen: Mapping[int, Mapping[str, float]]
    counted: Baselines | None

    @property
    def losses(self) -> dict[int, float]:
        return {int(record["step"]): token_loss(record) for record in self.history.evaluations}

    @cached_property
    def tokens(self) -> int:
        return round(float(self.history.steps.column("tokens").sum()))

    @property
    def detection(self) -> tuple[float, float] | None:
        """Of a discriminator: the share of held-out tokens that it judges right, and that are original."""
        last = self.history.evaluations[-1] if self.history.evaluations else {}
        if "rtd_accuracy" not in last:
            return None
        return float(last["rtd_accuracy"]), 1 - float(last["rtd_replaced"])


class Found:
    """Everything below a comparison's folder."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seeds = place.comparison.pretraining.seeds
        self._results = Results(open_store(str(place.results)))
        self.runs: dict[str, dict[int, Trained]] = {
            family: dict(self._trained(family)) for family in place.comparison.families
        }

    def _trained(self, family: str) -> Iterator[tuple[int, Trained]]:
        for seed in self._seeds:
            folder = self._place.run(family, seed)
            if (folder / RECORD).exists() and is_complete(run := open_run(str(folder))):
                yield seed, _read(run)

    def loss(self, family: str, step: int) -> Seen:
        """Held-out, after `step` steps."""
        runs = self.runs[family]
        return Seen({seed: one.losses[step] for seed, one in runs.items() if step in one.losses})

    def frozen(self, family: str, step: int, name: str) -> Seen:
        """`probe sst2`, `similarity sts-...`, ... of the weights after `step` steps."""
        runs = self.runs[family]
        return Seen(
            {seed: one.frozen[step][name] for seed, one in runs.items() if name in one.frozen.get(step, {})}
        )

    def finetuned(self, family: str, task: str, *, trained: bool) -> Seen:
        """The task's main metric on its test split, with the comparison's settings."""
        found = {}
        for seed in self._seeds:
            folder = self._place.run(family, seed) if trained else self._place.untrained(family, seed)
            result = self._cells.get((str(folder), task, seed))
            if result is not None and (value := _on_test(result)) is not None:
                found[seed] = value
        return Seen(found)

    def similarity(self, source: Path, task: str) -> float | None:
        """Of the vectors of the model at `source`."""
        result = self._vectors.get((str(source), task))
        return None if result is None else result.measured.metrics["spearman"]

    @cached_property
    def _cells(self) -> dict[tuple[str, str, int], Result]:
        wanted = {measure.task: measure for measure in domain_measures(self._place, DOMAIN)}
        return {
            (cell.source, cell.task, cell.seed): result
            for result in self._all("finetune")
            if (cell := result.cell).task in wanted
            and (cell.settings, cell.data) == (wanted[cell.task].settings, wanted[cell.task].data)
        }

    @cached_property
    def _vectors(self) -> dict[tuple[str, str], Result]:
        return {(result.cell.source, result.cell.task): result for result in self._all("embed")}

    def _all(self, measure: str) -> Iterator[Result]:
        """Results under the name by which each cell was asked for."""
        cells = [cell for grid in self._results.grids() for cell in grid.cells if cell.measure == measure]
        found = self._results.find_all(cell.key for cell in cells)
        for cell in cells:
            if cell.key in found:
                yield found[cell.key].model_copy(update={"cell": cell})

    def failures(self) -> dict[str, str]:
        """The last line that each failed job said, by its name."""
        files = sorted((self._place.root / "failures").glob("*.txt"))
        return {file.stem: file.read_text("utf-8").strip().splitlines()[-1] for file in files}

    @property
    def published(self) -> Published | None:
        """None if none was measured."""
        return read_published(self._place)


def _read(run: Run) -> Trained:
    frozen = {
        item.commit.step: dict(_figures(item, run.recipe.model.layers)) for item in evaluated(run.store)
    }
    counted = None
    if run.store.size(KEY) is not None:
        counted = Baselines.model_validate_json(run.store.get(KEY))
    return Trained(run, read_history(run.store), frozen, counted)


def _figures(item: Evaluated, layers: int) -> Iterator[tuple[str, float]]:
    """Of probes that over all layers, of similarity that of the last one."""
    for result in item.results:
        for figure in result.figures:
            if figure.value is None:
                continue
            if figure.measure == "majority" or (figure.measure == "accuracy" and figure.layer is None):
                yield f"{result.cell.task.name} {figure.measure}", figure.value
            elif figure.measure == "spearman" and figure.layer == layers:
                yield f"{result.cell.task.name} {figure.form}", figure.value


def _on_test(result: Result) -> float | None:
    others = result.measured.details.get("others")
    if not isinstance(others, dict) or "test" not in others:
        return None
    return float(next(iter(others["test"].values())))
