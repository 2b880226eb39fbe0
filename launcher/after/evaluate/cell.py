"""A cell: one measurement of one checkpoint, a pure function of what its key is made of. And its result, as an object.

    weights    the digest of the files that decide what the model predicts
    measure    what is done with them: fine-tuning, a frozen measure, an embedding's evaluation
    task       the digest of the task: its data and what else of it decides a result
    settings   every one, defaults included
    seed

Names are no part of it: a checkpoint that was moved, or a task under another name, has its results already. A result is
written once, by conditional put: of several processes that compute the same cell, one is kept.

    rules-2/<key>.json          a result; the folder is the version of our code's rules
    models/<digest>.json        a run's checkpoint: the digest of what it is exported as
    grids/<digest>.json         a grid: which cells a command asked for, so that its table can be made again
    searched/<digest>.json      whether a model's corpora were searched for a task's texts (`searched.py`)
    claims/<key>/               who computes it (launcher.after.evaluate.compute_cell)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from data_service.store.base import Entry, Store, digest
from launcher.runtime.run.sealed import Sealed, keep, name_of, read, read_all, seal

if TYPE_CHECKING:
    from launcher.after.finetune.pretrained import LocalModel


RULES = 2
"""The version of what our code does with a cell. Raise it with every change after which some cell gives another result:
results of different rules are never mixed."""

Settings = Mapping[str, object]


class Cell(BaseModel):
    """A cell of a grid: a checkpoint, a task, and the measurement.

    Attributes:
        source, step: place of the checkpoint, for the user.
        weights: digest of the checkpoint.
        task: name of the task, for the user.
        data: digest of the task.
        measure, settings, seed: kind, settings (plain JSON) and seed of the measurement.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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
        """Hash of all fields except names, 32 hexadecimal digits."""
        return name_of([self.weights, self.measure, self.data, self.settings, self.seed])

    @property
    def checkpoint(self) -> str:
        """The checkpoint as people read it, such as `runs/base at step 1,000`."""
        return self.source if self.step is None else f"{self.source} at step {self.step:,}"

    @property
    def name(self) -> str:
        """Name of the cell in errors, for the user."""
        lr = f", lr {self.settings['lr']:g}" if isinstance(self.settings.get("lr"), float) else ""
        return f"{self.measure} of {self.checkpoint} on {self.task}{lr}, seed {self.seed}"


class CellFigures(BaseModel):
    """The figures of a cell.

    Attributes:
        metrics: metrics by name; None for a number that is not finite (a correlation with a constant). Checkpoints are
            compared by the first metric.
        details: further results (epochs, curves).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: dict[str, float | None]
    details: dict[str, object] = {}


class Measure(Protocol):
    """A measurement of checkpoints, as plain data that are sent to the process that makes it."""

    @property
    def kind(self) -> str: ...

    @property
    def task(self) -> str: ...

    @property
    def data(self) -> str: ...

    @property
    def settings(self) -> dict[str, object]: ...

    @property
    def seeded(self) -> bool:
        """Whether the figures depend on the seed. If not, one seed is enough."""
        ...

    def measure(self, pretrained: "LocalModel", seed: int, place: Path) -> CellFigures:
        """Measure a checkpoint. The figures depend only on `pretrained` and `seed`. `place`: folder that the cells on
        this machine share.

        Raises subclasses of UserError if the checkpoint cannot be measured."""
        ...


@dataclass(frozen=True)
class CellWork:
    """A cell, and how it is computed."""

    cell: Cell
    measure: Measure


class Result(Sealed):
    """The result of a cell.

    Attributes:
        rules: version of the rules in our code.
        versions: versions of the libraries that computed it.
    """

    format: Literal[1] = 1
    rules: int
    cell: Cell
    measured: CellFigures
    versions: dict[str, str]

    @property
    def path(self) -> str:
        """The key of the result in its store, made of the version of the rules and the cell's key."""
        return f"rules-{self.rules}/{self.cell.key}.json"


_RULES, _GRIDS, _MODELS = "rules-", "grids/", "models/"


class GridRecord(Sealed):
    """The grid that a command asked for.

    Attributes:
        suite: name of the suite.
        cells: all cells, in the order of the table.
    """

    suite: str
    cells: tuple[Cell, ...]

    @property
    def path(self) -> str:
        return f"{_GRIDS}{digest(seal(self))}.json"


class KnownModel(Sealed):
    """A run's checkpoint that was exported once.

    Attributes:
        name: digest of everything that the export depends on.
        source, step: as in `Cell`.
        weights: digest of the export.
    """

    name: str
    source: str
    step: int | None
    weights: str

    @property
    def path(self) -> str:
        return f"{_MODELS}{self.name}.json"


class Results:
    """The results in a store. Every method raises StoreError and its subclasses."""

    def __init__(self, store: Store, rules: int = RULES) -> None:
        self.store = store
        self.rules = rules

    def find(self, key: str) -> Result | None:
        """Return the result of the cell `key`; None if there is none, or the stored bytes are no result of this
        cell."""
        return read(self.store, self._path(key), Result)

    def find_all(self, keys: Iterable[str]) -> dict[str, Result]:
        """Return those that there are, by key. One listing, and a request for each that there is."""
        there = {entry.key.partition("/")[2].removesuffix(".json") for entry in self._listed()}
        wanted = [self._path(key) for key in dict.fromkeys(keys) if key in there]
        return {result.cell.key: result for result in read_all(self.store, wanted, Result)}

    def keep(self, result: Result) -> Result:
        """Store a result and return it. If another process has stored a result, keep and return that one. Bytes that
        are no result are replaced."""
        return keep(self.store, result)

    def under_other_rules(self, keys: Iterable[str]) -> dict[int, int]:
        """Return how many of these cells have results of other versions of the rules, by version."""
        wanted, counts = set(keys), dict[int, int]()
        for folder in self.store.folders():
            version = folder.removeprefix(_RULES)
            if not folder.startswith(_RULES) or not version.isdecimal() or int(version) == self.rules:
                continue
            names = (entry.key.partition("/")[2] for entry in self.store.list(f"{folder}/"))
            count = sum(name.removesuffix(".json") in wanted for name in names)
            counts |= {int(version): count} if count else {}
        return counts

    def keep_grid(self, grid: GridRecord) -> None:
        """Record a grid. Recording the same grid again yields the same object."""
        keep(self.store, grid)

    def grids(self) -> Iterator[GridRecord]:
        """Yield the recorded grids, the oldest first. Objects that are no grid are passed over."""
        keys: Sequence[str] = [entry.key for entry in self.store.list(_GRIDS)]
        ages = {key: self.store.age(key) or 0.0 for key in keys}
        for key in sorted(keys, key=lambda name: (-ages[name], name)):
            grid = read(self.store, key, GridRecord)
            if grid is not None:
                yield grid

    def known_model(self, name: str) -> KnownModel | None:
        """Return what was kept under that name."""
        return read(self.store, f"{_MODELS}{name}.json", KnownModel)

    def keep_model(self, model: KnownModel) -> None:
        """Record a model for `known_model`."""
        keep(self.store, model)

    def forget_model(self, name: str) -> None:
        """Delete the record of a model whose export has another digest now."""
        self.store.delete(f"{_MODELS}{name}.json")

    def _path(self, key: str) -> str:
        return f"{_RULES}{self.rules}/{key}.json"

    def _listed(self) -> Iterator[Entry]:
        return self.store.list(f"{_RULES}{self.rules}/")
