"""Figures of a step and of held-out rows: means from global sums, under the names used in metrics files and reports.

Held-out rows have the same masks and draws every time, whatever the world size.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.objectives.losses import CoupledObjective, LossSums
from encoder_core.train.engine import Engine, Update
from encoder_core.train.exchange import Control, RankExamples, Signals
from encoder_core.train.state import TrainState
from encoder_core.train.step import Microbatch, Sums, gather_sums, seed_draws
from encoder_core.train.timing import Pace

TARGETS = "_targets"
WEIGHTED = "_weighted"

RATIOS = {
    "loss": ("loss", "targets"),
    "accuracy": ("correct", "targets"),
    "precision": ("found", "flagged"),
    "recall": ("found", "replaced"),
    "replaced": ("replaced", "targets"),
    "positive_similarity": ("positive", "targets"),
    "negative_similarity": ("negative", "targets"),
}
"""Figures of a term, as one of its sums over another. For detection: of the tokens it flagged, how many were
replaced; of those replaced, how many it found; and the share that was replaced, 1 less which is the accuracy of never
flagging any. For contrastive training: how near the texts of an example are, and texts that do not belong together
(where that nears the former, all vectors are becoming one)."""

_IN_RATIOS = {WEIGHTED.strip("_"), *(name for ratio in RATIOS.values() for name in ratio)}


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """`loss`, the weighted sum of all terms, and each term's `<term>_<figure>` of `RATIOS` whose sums are there.

    Sums are named `<term>_<sum>`. One that is in no ratio is a figure by its own name: its mean over the term's
    targets. A ratio of nothing to nothing is 0.
    """
    terms = [name.removesuffix(TARGETS) for name in sums if name.endswith(TARGETS)]
    figures = {"loss": sum(sums[term + WEIGHTED] / max(1.0, sums[term + TARGETS]) for term in terms)}
    for term in terms:
        for figure, (part, whole) in RATIOS.items():
            if f"{term}_{part}" in sums and f"{term}_{whole}" in sums:
                figures[f"{term}_{figure}"] = sums[f"{term}_{part}"] / max(1.0, sums[f"{term}_{whole}"])
    for name, value in sums.items():
        term = max((term for term in terms if name.startswith(f"{term}_")), key=len, default="")
        if term and name.removeprefix(f"{term}_") not in _IN_RATIOS:
            figures[name] = value / max(1.0, sums[term + TARGETS])
    return figures


@dataclass(frozen=True)
class StepReport:
    """One step as it was: the state before it, what it saw, and what came of it."""

    before: TrainState
    samples: tuple[tuple[int, int, int], ...]
    signals: Signals
    sums: Mapping[str, float]
    learning_rate: float
    updates: Mapping[str, Update]
    seconds: float
    paces: tuple[Pace, ...] = ()

    @property
    def applied(self) -> dict[str, bool]:
        """By update group: whether its update moved weights."""
        return {group: update.applied for group, update in self.updates.items()}

    def record(self) -> dict[str, Any]:
        """The line of the metrics file (schema in infra/docs/records.md). Losses are per target, in nats.

        Ranks begin their first step at different times, so another's wait may be longer than this rank's step.
        """
        wait = min(self.signals.wait, self.seconds)
        return {
            "kind": "step",
            "step": self.before.step,
            **means(self.sums),
            "tokens": self.signals.tokens,
            "targets": int(sum(self.signals.counts.values())),
            "lr": self.learning_rate,
            **self._gradient_norms(),
            "skipped": not all(self.applied.values()),
            "seconds": self.seconds,
            "data_wait": wait,
            "data_wait_share": wait / self.seconds if self.seconds > 0 else 0.0,
            "samples": [list(span) for span in self.samples],
            "digest": self.signals.digest,
        }

    def _gradient_norms(self) -> dict[str, float]:
        """Of all gradients together; in a step of several update groups also of each group."""
        norms = {f"{group}_grad_norm": update.grad_norm for group, update in self.updates.items()}
        return {"grad_norm": math.hypot(*norms.values())} | (norms if len(norms) > 1 else {})


EVALUATION = "evaluation"  # the "update group" of its draws, which are those of step 0 each time


def evaluate(
    engine: Engine, control: Control, microbatches: Iterable[Microbatch], seed: int
) -> dict[str, float]:
    """Mean losses and metrics over the held-out rows of all ranks, dropout off; a generator draws by `seed`.

    Every rank passes the same number of microbatches (idle ones included): ZeRO 3 gathers weights in each forward.
    """
    engine.training(False)
    totals = gather_sums(control, sum_losses(engine, engine.objective, microbatches, seed))
    return means(totals) | {name: n for name, n in totals.items() if name.endswith(TARGETS)}


@torch.no_grad()
def sum_losses(
    forward: Callable[[Batch], LossSums], objective: nn.Module, microbatches: Iterable[Microbatch], seed: int
) -> dict[str, float]:
    """This rank's sums of losses, targets and metrics. `forward` is `objective`, or the engine around it.

    A coupled objective takes all rows of all ranks as one batch: then it is collective.
    """
    sums, coupled = Sums(), list[Tensor]()
    for microbatch in microbatches:
        seed_draws(seed, 0, microbatch.index, EVALUATION)
        losses = forward(microbatch.batch)
        sums.add(losses)
        coupled += losses.memory if isinstance(objective, CoupledObjective) else ()
    if isinstance(objective, CoupledObjective):
        everyone, joined = RankExamples.meet(coupled)
        sums.add(objective.losses(joined, objective.couple(joined, everyone)))
    return sums.collect()
