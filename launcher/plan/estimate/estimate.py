"""What a recipe comes to on a cluster: memory, time, data, checkpoints and money, with the arithmetic kept.

How often to save, and what failures cost, follows Young 1974 and Daly 2006 ("A higher order estimate of the optimum
checkpoint interval for restart dumps"). A save blocks training for `blocked` seconds and is worth something only when
it is committed, `behind` seconds later: what a failure loses is the work since the last commit, so `behind` is lost
like the time to restart. Failures are taken as independent, of constant rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_service.stream.statistics import Radius
from encoder_core.cost.products import Shape
from encoder_core.train import zero_memory as memory
from encoder_core.train.zero_memory import STAGES, MemoryPart, Stage
from launcher.plan.estimate.data_needs import DataNeeds, data_needs, shuffle_radius
from launcher.plan.estimate.roofline import assumed
from launcher.plan.estimate.throughput import PhaseTime, phase_time
from launcher.runtime.capacity.devices import (
    COPY_RATE,
    RESTART,
    SAVE_FIXED,
    STORE_RATE,
    AssumedUtilisation,
    Cluster,
    check_share,
    usable,
)
from launcher.runtime.capacity.memory_fit import Bill, bill, rows_that_fit
from launcher.runtime.capacity.workload import microbatch_shape
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.summary import has_automatic, known, parameters, settled, state_bytes


@dataclass(frozen=True)
class Saving:
    """Seconds: training waits, until the commit, and from a failure to the next step."""

    blocked: float
    behind: float
    restart: float


def young(blocked: float, mtbf: float) -> float:
    """sqrt(2 d M)."""
    return math.sqrt(2 * blocked * mtbf)


def daly(blocked: float, mtbf: float) -> float:
    """Daly's estimate, sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2 M, else M."""
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return young(blocked, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def best_interval(saving: Saving, mtbf: float) -> float:
    """Daly's, but no shorter than a save takes: there is one at a time."""
    return max(daly(saving.blocked, mtbf), saving.behind)


def goodput(saving: Saving, interval: float, mtbf: float) -> float:
    """Share of wall time that ends up in the model, saving after every `interval` seconds of work.

    Daly's complete model: wall time for each interval is M e^(r/M) (e^((t + d)/M) - 1), with r the restart and, for us,
    the time to a commit. Below 1e-9 it is 0.
    """
    lost = (saving.restart + saving.behind) / mtbf
    each = (interval + saving.blocked) / mtbf
    if lost + each > 20:
        return 0.0
    return interval / (mtbf * math.exp(lost) * math.expm1(each))


@dataclass(frozen=True)
class MemoryFit:
    """One microbatch size at one ZeRO stage: the bill, and whether a GPU can pay it. Rows are of the longest phase."""

    stage: Stage
    rows: int
    parts: tuple[MemoryPart, ...]
    fits: bool

    @property
    def bytes(self) -> int:
        return memory.total(self.parts)


@dataclass(frozen=True)
class Checkpoints:
    """A checkpoint's size and times, and the interval that loses least. Seconds and bytes.

    Attributes:
        bytes: of one checkpoint. `mtbf`: between failures of the whole cluster.
        young, daly, best: intervals; the last also no shorter than a save.
        chosen: the recipe's.
        goodput, goodput_chosen: share of wall time that counts, at the best and at the recipe's interval.
    """

    bytes: int
    saving: Saving
    mtbf: float
    young: float
    daly: float
    best: float
    chosen: float
    goodput: float
    goodput_chosen: float


@dataclass(frozen=True)
class Estimate:
    """Everything. `fits` in the order of stages, then rows; `radius` of the shuffle, None where there is none;
    `seconds` of wall time, failures included.

    Attributes:
        text: bytes of the corpus, uncompressed, where they were given.
        recipe: with the rows of microbatches that memory permits, where the recipe leaves them to it (`automatic`).
    """

    recipe: Recipe
    automatic: bool
    cluster: Cluster
    parameters: int
    phases: tuple[PhaseTime, ...]
    fits: tuple[MemoryFit, ...]
    data: DataNeeds
    radius: Radius | None
    checkpoints: Checkpoints
    seconds: float
    text: float | None = None

    @property
    def tokens(self) -> int:
        """Of the whole run; those of a batch that rises as of its end."""
        return sum(phase.steps * phase.rows * phase.length for phase in self.phases)

    @property
    def gpu_hours(self) -> float:
        return self.cluster.ranks * self.seconds / 3600

    @property
    def fullest(self) -> PhaseTime:
        """The phase whose microbatch decides memory."""
        return max(self.phases, key=_fullness)

    @property
    def as_configured(self) -> MemoryFit | None:
        """The recipe's own stage and microbatch; None for a stage that its precision does not have."""
        chosen = [fit for fit in self.fits if fit.stage == self.recipe.zero]
        return max(chosen, key=lambda fit: fit.rows, default=None)

    def largest(self, stage: Stage) -> MemoryFit | None:
        """Of those that fit at a stage, the most rows."""
        fitting = [fit for fit in self.fits if fit.stage == stage and fit.fits]
        return max(fitting, key=lambda fit: fit.rows, default=None)


def estimate(
    recipe: Recipe,
    cluster: Cluster,
    mfu: float | None = None,
    measured: Sequence[AssumedUtilisation] = (),
    text: float | None = None,
) -> Estimate:
    """What `recipe` needs and takes; `mfu`, or what was `measured` of each phase, in place of what is assumed.

    Raises EstimateError: a utilisation that is no share.
    """
    check_share(mfu)
    count = parameters(recipe)
    recipe, automatic = recipe.model_copy(update={"model": known(recipe.model)}), has_automatic(recipe)
    if automatic:
        most = rows_that_fit(Bill(recipe, count, cluster.ranks, "cuda"), usable(cluster.gpu.memory))
        recipe = settled(recipe, cluster.ranks, most)
    shares = measured or [_share(recipe, phase, cluster, mfu) for phase in recipe.phases]
    phases = tuple(
        phase_time(recipe, phase, cluster, count, share)
        for phase, share in zip(recipe.phases, shares, strict=True)
    )
    fastest = max(phase.tokens_per_second for phase in phases)
    work = sum(phase.seconds for phase in phases)
    saved = _checkpoints(recipe, cluster, count, work / sum(phase.steps for phase in phases))
    return Estimate(
        recipe=recipe,
        automatic=automatic,
        cluster=cluster,
        parameters=count,
        phases=phases,
        fits=tuple(_fits(recipe, cluster, count, max(phases, key=_fullness))),
        data=data_needs(recipe, recipe.model.vocabulary, fastest),
        radius=shuffle_radius(recipe),
        checkpoints=saved,
        seconds=work / saved.goodput_chosen if saved.goodput_chosen else float("inf"),
        text=text,
    )


def _fullness(phase: PhaseTime) -> tuple[int, int, int]:
    """Tokens of a microbatch, then the length of its rows, then their targets."""
    return phase.shape.tokens, phase.length, phase.shape.targets_per_row


def _share(recipe: Recipe, phase: RecipePhase, cluster: Cluster, mfu: float | None) -> AssumedUtilisation:
    if mfu is not None:
        return AssumedUtilisation(mfu, "given")
    return assumed(recipe, microbatch_shape(recipe, phase), cluster.gpu)


def _fits(recipe: Recipe, cluster: Cluster, count: int, phase: PhaseTime) -> list[MemoryFit]:
    return [
        _fit(
            recipe,
            cluster,
            count=count,
            stage=stage,
            shape=replace(phase.shape, rows=rows),
            rounds=phase.rounds,
        )
        for stage in STAGES
        if stage or recipe.precision == "fp32"
        for rows in halvings(phase.shape.rows)
    ]


def halvings(rows: int) -> list[int]:
    """1, 2, 4, ... and `rows` itself."""
    powers = [1 << i for i in range(rows.bit_length()) if 1 << i < rows]
    return [*powers, rows]


def _fit(recipe: Recipe, cluster: Cluster, count: int, stage: Stage, shape: Shape, rounds: int) -> MemoryFit:
    parts = bill(recipe, count, cluster.ranks, stage, shape=shape, rounds=rounds)
    return MemoryFit(stage, shape.rows, parts, memory.total(parts) <= usable(cluster.gpu.memory))


def _checkpoints(recipe: Recipe, cluster: Cluster, count: int, step: float) -> Checkpoints:
    size = state_bytes(recipe, count)
    of_node = size / cluster.nodes
    saving = Saving(
        blocked=SAVE_FIXED + size / cluster.ranks / COPY_RATE,
        behind=of_node / STORE_RATE,
        restart=RESTART + of_node / STORE_RATE,
    )
    mtbf = cluster.mtbf / cluster.nodes
    best, chosen = best_interval(saving, mtbf), _interval(recipe, step)
    return Checkpoints(
        bytes=size,
        saving=saving,
        mtbf=mtbf,
        young=young(saving.blocked, mtbf),
        daly=daly(saving.blocked, mtbf),
        best=best,
        chosen=chosen,
        goodput=goodput(saving, best, mtbf),
        goodput_chosen=goodput(saving, chosen, mtbf),
    )


def _interval(recipe: Recipe, step: float) -> float:
    """Seconds between the recipe's saves."""
    every = recipe.checkpoint.every
    by_steps = every.steps * step if every.steps is not None else float("inf")
    by_minutes = 60 * every.minutes if every.minutes is not None else float("inf")
    return min(by_steps, by_minutes)
