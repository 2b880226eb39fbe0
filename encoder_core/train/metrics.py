"""Figures of a step: means from global sums, under the names used in metrics files and reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder_core.train.engine import Update
from encoder_core.train.signals import Signals
from encoder_core.train.state import TrainState

TARGETS = "_targets"
CORRECT = "_correct"


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over targets to means: `mlm_loss` is divided by `mlm_targets`; so is `mlm_correct`, as `mlm_accuracy`.

    Sums are named `<term>_<figure>`; a term without targets gives 0.
    """
    figures: dict[str, float] = {}
    for name, value in sums.items():
        term, figure = name.split("_", 1)
        if figure != TARGETS[1:]:
            mean = value / max(1.0, sums[term + TARGETS])
            figures[name.removesuffix(CORRECT) + "_accuracy" if name.endswith(CORRECT) else name] = mean
    return figures


@dataclass(frozen=True)
class StepReport:
    """One step as it was: the state before it, what it saw, and what came of it."""

    before: TrainState
    samples: tuple[tuple[int, int, int], ...]
    signals: Signals
    sums: Mapping[str, float]
    learning_rate: float
    update: Update
    seconds: float

    def record(self) -> dict[str, Any]:
        """The line of the metrics file (schema in launcher/README.md). Losses are per target, in nats."""
        figures = means(self.sums)
        losses = [value for name, value in figures.items() if name.endswith("_loss")]
        return {
            "kind": "step",
            "step": self.before.step,
            "loss": sum(losses),
            **figures,
            "tokens": self.signals.tokens,
            "targets": int(sum(self.signals.counts.values())),
            "lr": self.learning_rate,
            "grad_norm": self.update.grad_norm,
            "skipped": not self.update.applied,
            "seconds": self.seconds,
            "data_wait": self.signals.wait,
            "data_wait_share": self.signals.wait / self.seconds if self.seconds > 0 else 0.0,
            "samples": [list(span) for span in self.samples],
            "digest": self.signals.digest,
        }
