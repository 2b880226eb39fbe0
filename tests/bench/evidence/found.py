"""What was measured so far in a comparison's folder, read back from its runs and its grid; nothing is computed."""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from launcher.after.evaluate.cell import Result, Results

from data_service.store.open import open_store
from launcher.observe.inspect.kept_baselines import KEY, Baselines
from launcher.runtime.run.evaluations import Evaluated, evaluated
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import token_loss
from launcher.runtime.run.record import RECORD, Run, open_run

from .figures import Basis, Counted, Detection, Figures, RunFigures, Source
from .measuring import DOMAIN, domain_measures
from .place import Place
from .pretraining import is_complete
from .published import read_published
from .vectors import METHODS, folder_of


def figures_of(place: Place) -> Figures:
    """Of every run that was trained to its end."""
    measured = _Measured(place)
    runs = {
        family: {
            seed: found
            for seed in place.comparison.pretraining.seeds
            if (found := measured.run(family, seed))
        }
        for family in place.comparison.families
    }
    return Figures(
        basis=_basis(place),
        runs={family: found for family, found in runs.items() if found},
        published=read_published(place),
    )


def failures(place: Place) -> dict[str, str]:
    """The last line that each failed job said, by its name."""
    files = sorted((place.root / "failures").glob("*.txt"))
    return {file.stem: file.read_text("utf-8").strip().splitlines()[-1] for file in files}


class _Measured:
    """Everything below a comparison's folder."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._results = Results(open_store(str(place.results)))

    def run(self, family: str, seed: int) -> RunFigures | None:
        """None while it is trained."""
        folder = self._place.run(family, seed)
        if not (folder / RECORD).exists() or not is_complete(run := open_run(str(folder))):
            return None
        history = read_history(run.store)
        last = history.evaluations[-1] if history.evaluations else {}
        return RunFigures(
            tokens=round(float(history.steps.column("tokens").sum())),
            losses={int(record["step"]): token_loss(record) for record in history.evaluations},
            frozen={
                item.commit.step: dict(_frozen(item, run.recipe.model.layers))
                for item in evaluated(run.store)
            },
            counted=_counted(run),
            detection=Detection(right=last["rtd_accuracy"], original=1 - last["rtd_replaced"])
            if "rtd_accuracy" in last
            else None,
            finetuned=self._finetuned(folder, seed),
            scratch=self._finetuned(self._place.untrained(family, seed), seed),
            similarity=self._similarity(family, seed),
        )

    def _finetuned(self, folder: Path, seed: int) -> dict[str, float]:
        results = {
            task: self._cells[key] for task in DOMAIN if (key := (str(folder), task, seed)) in self._cells
        }
        values = {task: _on_test(result) for task, result in results.items()}
        return {task: value for task, value in values.items() if value is not None}

    def _similarity(self, family: str, seed: int) -> dict[str, dict[Source, float]]:
        place = self._place
        sources: dict[Source, Path] = {
            "untrained": place.untrained(family, seed),
            "pretrained": place.run(family, seed),
            **{method: folder_of(place, method, family, seed) for method in METHODS},
        }
        return {
            task: {
                source: value
                for source, folder in sources.items()
                if (str(folder), task) in self._vectors
                and (value := self._vectors[str(folder), task].measured.metrics["spearman"]) is not None
            }
            for task in _sts(place)
        }

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


def _basis(place: Place) -> Basis:
    """The families and the seeds that were asked for do not belong to it, nor where anything lies."""
    settings = place.comparison.model_dump(mode="json", exclude={"families": True, "pretraining": {"seeds"}})
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    files = [*sorted(place.text.rglob("*.jsonl")), *sorted(place.tasks.rglob("*.*"))]
    for file in files:
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return Basis(
        digest=digest.hexdigest(),
        text={folder.name: _size(folder) for folder in sorted(place.text.iterdir()) if folder.is_dir()},
        examples={task: _examples(place, task) for task in DOMAIN},
        sts=_sts(place),
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.jsonl"))


def _sts(place: Place) -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in place.tasks.glob("sts-*.yaml")))


def _examples(place: Place, task: str) -> str:
    train, test = (
        [
            json.loads(line).get("label")
            for line in (place.tasks / task / f"{split}.jsonl").open(encoding="utf-8")
        ]
        for split in ("train", "test")
    )
    common = max(train, key=train.count)
    majority = (
        "" if common is None else f" (the most frequent label: {100 * test.count(common) / len(test):.1f})"
    )
    return f"{len(test):,} passages or pairs{majority}"


def _counted(run: Run) -> Counted | None:
    if run.store.size(KEY) is None:
        return None
    counted = Baselines.model_validate_json(run.store.get(KEY))
    return Counted(unigram=counted.unigram, bigram=counted.bigram)


def _frozen(item: Evaluated, layers: int) -> Iterator[tuple[str, float]]:
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
