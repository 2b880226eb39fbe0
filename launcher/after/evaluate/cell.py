"""A cell: one measurement of one checkpoint, a pure function of what its key is made of.

    weights    the digest of the files that decide what the model predicts
    measure    what is done with them: fine-tuning, a frozen measure, an embedding's evaluation
    task       the digest of the task: its data and what else of it decides a result
    settings   every one, defaults included
    seed

Names are no part of it: a checkpoint that was moved, or a task under another name, has its results already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from launcher.runtime.run.sealed import Sealed, name_of

if TYPE_CHECKING:
    from launcher.after.finetune.pretrained import LocalModel

RULES = 1
"""The version of what our code does with a cell. Raise it with every change after which some cell gives another result:
results of different rules are never mixed."""

Settings = Mapping[str, object]


class Cell(BaseModel):
    """What is measured.

    Attributes:
        source, step: where the checkpoint was found. For people.
        weights: its digest.
        task: the task's name. For people.
        data: the task's digest.
        measure, settings, seed: what is done; settings are plain JSON.
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
        """32 hexadecimal digits, over all but names."""
        return name_of([self.weights, self.measure, self.data, self.settings, self.seed])

    @property
    def checkpoint(self) -> str:
        """For people: `runs/base at step 1,000`."""
        return self.source if self.step is None else f"{self.source} at step {self.step:,}"

    @property
    def name(self) -> str:
        """For people: what an error is about."""
        lr = f", lr {self.settings['lr']:g}" if isinstance(self.settings.get("lr"), float) else ""
        return f"{self.measure} of {self.checkpoint} on {self.task}{lr}, seed {self.seed}"


class CellFigures(BaseModel):
    """What a cell gives.

    Attributes:
        metrics: by name; None where one is no finite number (a correlation with a constant). The first is the one
            that checkpoints are compared by.
        details: whatever else is worth keeping (epochs, curves).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: dict[str, float | None]
    details: dict[str, object] = {}


class Measure(Protocol):
    """What is done with a checkpoint, as plain data, which is sent to the process that does it."""

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
        """Whether a seed decides anything; else one is enough."""
        ...

    def measure(self, pretrained: "LocalModel", seed: int, place: Path) -> CellFigures:
        """A pure function of `pretrained` and `seed`; `place` is a folder of this machine that its cells share.

        Raises UserError kinds for what cannot be measured."""
        ...


@dataclass(frozen=True)
class CellWork:
    """A cell, and how it is computed."""

    cell: Cell
    measure: Measure


class Result(Sealed):
    """A cell that was computed.

    Attributes:
        rules: the version of our code's rules.
        versions: of the libraries that computed it.
    """

    format: Literal[1] = 1
    rules: int
    cell: Cell
    measured: CellFigures
    versions: dict[str, str]

    @property
    def path(self) -> str:
        """By rules and key."""
        return f"rules-{self.rules}/{self.cell.key}.json"
