"""The result of a fine-tuning, and the errors with which one ends."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from launcher.after.tasks.metrics import Predictions
from launcher.errors import RunError

Tags = tuple[tuple[int, ...], ...]


class TaskMismatch(RunError):
    """A task that this checkpoint, or these settings, cannot learn."""


class Diverged(RunError):
    """A fine-tuning whose loss or gradient became infinite or no number."""


@dataclass(frozen=True)
class Epoch:
    """An epoch that was trained.

    Attributes:
        epoch: from 1.
        loss: mean over its updates.
        metrics: on dev after it, by name.
    """

    epoch: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FinetuneOutcome:
    """The kept epoch of one fine-tuning.

    Attributes:
        metrics: on dev, by name.
        best_epoch: from 1.
        curves: every epoch that was trained.
        losses: of every update, per target, before it.
        predictions: on dev, in the form that `launcher.after.tasks.metrics.score` takes.
        threshold: of the score of no answer, tuned on dev; None where the task knows no such thing.
        others: metrics on the task's other splits with labels, by split. Nothing was chosen by them.
    """

    metrics: Mapping[str, float]
    best_epoch: int
    curves: tuple[Epoch, ...]
    losses: tuple[float, ...]
    predictions: Predictions
    threshold: float | None = None
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """What a result's file says of it: all but predictions and single losses."""
        return {
            "metrics": dict(self.metrics),
            "others": {split: dict(metrics) for split, metrics in self.others.items()},
            "best_epoch": self.best_epoch,
            "curves": [asdict(epoch) for epoch in self.curves],
            "threshold": self.threshold,
        }
