"""Figures of a step and of held-out rows: means of global sums, with the names that metrics files and reports use.

Held-out rows have the same masks and random draws in every evaluation, for any world size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.objectives.figures import AVERAGE_PREFIX, TERM_FIGURES, TERM_LOSS
from encoder_core.objectives.modules.losses import CoupledObjective, LossSums
from encoder_core.train.engine import Engine, Update
from encoder_core.train.exchange import RankExamples, RankGroup, StepSignals
from encoder_core.train.settings import Pace
from encoder_core.train.state import TrainState
from encoder_core.train.step import Microbatch, RunningSums, gather_sums, seed_draws

TARGETS_SUFFIX = "_targets"  # ends the name of a term's number of targets
WEIGHTED_SUFFIX = "_weighted"  # ends the name of a term's loss sum times its weight

_FIGURES = (TERM_LOSS, *TERM_FIGURES)
# Names of the sums from which figures are computed; other sums are reported under their own names.
_SUMS_IN_FIGURES = {WEIGHTED_SUFFIX.strip("_"), *(name for one in _FIGURES for name in (one.part, one.whole))}


def figures_from_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Return `loss`, the weighted sum of all terms' mean losses, and the figures (`figures.py`) of each term.

    Sums are named `<term>_<sum>`. A sum that is part of no figure is reported under its own name, divided by the
    term's targets. 0 / 0 gives 0. `mlm` and `clm` have targets in different steps; the term without targets in this
    step is left out.
    """
    terms = [name.removesuffix(TARGETS_SUFFIX) for name in sums if name.endswith(TARGETS_SUFFIX)]
    terms = [term for term in terms if sums[term + TARGETS_SUFFIX] or not _has_targets_elsewhere(term, sums)]
    figures = {"loss": sum(sums[term + WEIGHTED_SUFFIX] / max(1.0, sums[term + TARGETS_SUFFIX]) for term in terms)}
    for term in terms:
        for figure in _FIGURES:
            part, whole = (sums.get(f"{term}_{name}") for name in (figure.part, figure.whole))
            if part is not None and whole is not None:
                figures[term + figure.suffix] = part / max(1.0, whole)
    for name, value in sums.items():
        term = max((term for term in terms if name.startswith(f"{term}_")), key=len, default="")
        if term and name.removeprefix(f"{term}_") not in _SUMS_IN_FIGURES:
            figures[name] = value / max(1.0, sums[term + TARGETS_SUFFIX])
    return figures


_ALTERNATE_TERMS = {"mlm": "clm", "clm": "mlm"}  # terms of which a step trains only one


def _has_targets_elsewhere(term: str, sums: Mapping[str, float]) -> bool:
    """Return whether `term` alternates with another term (mlm with clm), and this step has targets of the other."""
    return bool(sums.get(f"{_ALTERNATE_TERMS.get(term)}{TARGETS_SUFFIX}"))


@dataclass(frozen=True)
class CopyReport:
    """A copy of a rank's state in memory: seconds for which training waited for it, and its size."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True)
class StepReport:
    """A finished step: the state before it, its input, and its results. `copied`: the copy of the state made before the
    step, with 0 bytes if none was due; None: the run makes no copies."""

    before: TrainState
    samples: tuple[tuple[int, int, int], ...]
    signals: StepSignals
    sums: Mapping[str, float]
    learning_rate: float
    updates: Mapping[str, Update]
    seconds: float
    paces: tuple[Pace, ...] = ()
    copied: CopyReport | None = None

    @property
    def applied_by_group(self) -> dict[str, bool]:
        """Whether each group's update was applied, by update group."""
        return {group: update.applied for group, update in self.updates.items()}

    def to_record(self) -> dict[str, Any]:
        """Return the step's line of the metrics file (schema in infra/docs/records.md). Losses are per target, in nats.

        `data_wait` is the longest wait of any rank. Ranks start at different times, so in the first step it may exceed
        this rank's step time, by which it is limited.
        """
        wait = min(self.signals.wait, self.seconds)
        return {
            "kind": "step",
            "step": self.before.step,
            **figures_from_sums(self.sums),
            "tokens": self.signals.tokens,
            "targets": int(sum(self.signals.counts.values())),
            "lr": self.learning_rate,
            **self._gradient_norms(),
            "skipped": not all(self.applied_by_group.values()),
            "seconds": self.seconds,
            "data_wait": wait,
            "data_wait_share": wait / self.seconds if self.seconds > 0 else 0.0,
            **self._copy_figures(),
            "samples": [list(span) for span in self.samples],
            "digest": self.signals.digest,
        }

    def _gradient_norms(self) -> dict[str, float]:
        """Return the norm of all gradients and, if the step has several update groups, the norm of each group."""
        norms = {f"{group}_grad_norm": update.grad_norm for group, update in self.updates.items()}
        return {"grad_norm": math.hypot(*norms.values())} | (norms if len(norms) > 1 else {})

    def _copy_figures(self) -> dict[str, float]:
        if self.copied is None:
            return {}
        return {"copy_seconds": self.copied.seconds, "copy_bytes": self.copied.bytes}


# Stands in place of an update group's name in the seed of an evaluation's random draws; the seed's step is 0.
EVALUATION_DRAWS = "evaluation"


def evaluate_all(
    engine: Engine,
    control: RankGroup,
    heldout: Callable[[], Mapping[str, Iterable[Microbatch]]],
    seed: int,
    progress: Callable[[int], None],
) -> dict[str, float]:
    """Return the figures of `evaluate_texts`. If the engine keeps an average of the weights, also return the figures
    of the averaged weights, with the prefix `AVERAGE_PREFIX`. `heldout`: function that returns the texts.
    """
    texts = heldout()
    figures = evaluate_texts(engine, control, texts, seed, progress)
    if engine.average is None:
        return figures
    with engine.averaged_weights():
        found = evaluate_texts(engine, control, heldout(), seed, progress)
    sums = {f"{prefix}loss" for prefix in texts}
    terms = (name for name in found if name not in sums and not name.endswith(TARGETS_SUFFIX))
    return figures | {f"{AVERAGE_PREFIX}{name}": found[name] for name in terms}


def evaluate(engine: Engine, control: RankGroup, microbatches: Iterable[Microbatch], seed: int) -> dict[str, float]:
    """Return mean losses and metrics over the held-out rows of all ranks, without dropout. `seed` seeds the tokens that
    a generator samples.

    Every rank passes the same number of microbatches (idle ones included), because ZeRO 3 gathers weights in each
    forward pass.
    """
    engine.set_training(False)
    totals = gather_sums(control, sum_losses(engine, engine.objective, microbatches, seed))
    return figures_from_sums(totals) | {name: n for name, n in totals.items() if name.endswith(TARGETS_SUFFIX)}


def evaluate_texts(
    engine: Engine,
    control: RankGroup,
    texts: Mapping[str, Iterable[Microbatch]],
    seed: int,
    progress: Callable[[int], None],
) -> dict[str, float]:
    """Return the figures of `evaluate` on each held-out text; each figure's name begins with the text's prefix.

    `progress` is called with the number of finished microbatches, over all texts.
    """
    figures: dict[str, float] = {}
    numbers = count(1)
    for prefix, microbatches in texts.items():
        found = evaluate(engine, control, _with_progress(microbatches, numbers, progress), seed)
        figures |= {f"{prefix}{name}": figure for name, figure in found.items()}
    return figures


def _with_progress(
    microbatches: Iterable[Microbatch], numbers: Iterator[int], progress: Callable[[int], None]
) -> Iterator[Microbatch]:
    for microbatch in microbatches:
        yield microbatch
        progress(next(numbers))


@torch.no_grad()
def sum_losses(
    forward: Callable[[Batch], LossSums], objective: nn.Module, microbatches: Iterable[Microbatch], seed: int
) -> dict[str, float]:
    """Return this rank's sums of losses, targets and metrics. `forward`: `objective`, or the engine that wraps it.

    Collective for a coupled objective, which compares all rows of all ranks.
    """
    sums, coupled = RunningSums(), list[Tensor]()
    for microbatch in microbatches:
        seed_draws(seed, 0, microbatch.index, EVALUATION_DRAWS)
        losses = forward(microbatch.batch)
        sums.add(losses)
        coupled += losses.memory if isinstance(objective, CoupledObjective) else ()
    if isinstance(objective, CoupledObjective):
        everyone, joined = RankExamples.from_all_ranks(coupled)
        sums.add(objective.losses(joined, objective.couple(joined, everyone)))
    return sums.copy_to_host()
