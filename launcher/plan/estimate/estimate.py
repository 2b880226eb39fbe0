"""What a recipe needs on a cluster: memory, time, data, checkpoints and money, each with its arithmetic.

How often to save, and what failures cost, follows Young 1974 and Daly 2006 ("A higher order estimate of the optimum
checkpoint interval for restart dumps"). A save blocks training for `blocked` seconds. It is of use only once it is
committed, `behind` seconds later. A failure loses the work since the last commit, so `behind` counts as lost time,
like the time to restart. Failures are assumed to be independent, at a constant rate.
"""

import math
from dataclasses import dataclass

from data_service.stream.statistics import ShuffleRadius
from encoder_core.train import zero_memory as memory
from encoder_core.train.zero_memory import STAGES, MemoryPart, Stage
from launcher.plan.estimate.data_needs import DataNeeds, estimate_data_needs, estimate_shuffle_radius
from launcher.plan.estimate.throughput import PhaseTime, estimate_phase_time
from launcher.plan.estimate.utilisation import assume_utilisation, parse_utilisation
from launcher.runtime.capacity.devices import (
    GPU_TO_HOST_BYTES_S,
    RESTART_S,
    SAVE_PAUSE_S,
    STORE_BYTES_S,
    Cluster,
    usable_gpu_bytes,
)
from launcher.runtime.capacity.memory_fit import RankMemory, fixed_memory, microbatch_memory, rows_that_fit
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import (
    has_automatic_microbatch,
    parameter_count,
    state_bytes,
    with_microbatch_rows,
    with_vocab,
)


@dataclass(frozen=True)
class CheckpointTimes:
    """Times of saving and resuming, in seconds.

    Attributes:
        blocked: time that training waits for a save.
        behind: time from the end of that wait until the save is committed.
        restart: time from a failure to the next step.
    """

    blocked: float
    behind: float
    restart: float


def young_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Return Young's interval between saves, sqrt(2 d M), with d = `blocked_s` and M = `mtbf_s`, in seconds."""
    return math.sqrt(2 * blocked_s * mtbf_s)


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Return Daly's interval between saves: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2 M, else M,
    with d = `blocked_s` and M = `mtbf_s`, in seconds."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocked_s / (2 * mtbf_s)
    return young_interval_s(blocked_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked_s


def best_interval_s(times: CheckpointTimes, mtbf_s: float) -> float:
    """Return Daly's interval, but at least the time to commit a save, because only one save runs at a time."""
    return max(daly_interval_s(times.blocked, mtbf_s), times.behind)


def goodput(times: CheckpointTimes, interval_s: float, mtbf_s: float) -> float:
    """Return the share of wall time that is spent on work that no failure loses, with a save after every `interval_s`
    seconds of work.

    Daly's complete model: each interval takes M e^(r/M) (e^((t + d)/M) - 1) of wall time, where r is the time to
    restart plus the time to a commit. A share below 1e-9 is returned as 0.
    """
    lost = (times.restart + times.behind) / mtbf_s
    each = (interval_s + times.blocked) / mtbf_s
    if lost + each > 20:
        return 0.0
    return interval_s / (mtbf_s * math.exp(lost) * math.expm1(each))


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a microbatch of `rows` rows needs at a ZeRO stage, and whether it fits on a GPU. The rows are
    those of the phase that needs the most memory."""

    stage: Stage
    rows: int
    parts: tuple[MemoryPart, ...]
    fits: bool

    @property
    def total_bytes(self) -> int:
        return memory.total_bytes(self.parts)


@dataclass(frozen=True)
class CheckpointEstimate:
    """A checkpoint's size and times, and the interval between saves that loses the least time.

    Attributes:
        bytes: size of one checkpoint.
        saving: times of a save and of a restart.
        mtbf: mean seconds between failures of the whole cluster.
        young, daly: intervals by Young and by Daly, in seconds.
        best: Daly's interval, but at least the time to commit a save.
        chosen: the recipe's interval, in seconds.
        goodput, goodput_chosen: share of wall time for work that no failure loses, at `best` and at `chosen`.
    """

    bytes: int
    saving: CheckpointTimes
    mtbf: float
    young: float
    daly: float
    best: float
    chosen: float
    goodput: float
    goodput_chosen: float


@dataclass(frozen=True)
class Estimate:
    """Everything that is estimated of a recipe on a cluster.

    Attributes:
        recipe: the recipe; `microbatch: auto` is replaced with the largest rows that fit into memory.
        automatic: whether the recipe had `microbatch: auto`.
        parameters: number of parameters of all networks.
        phases: times of each phase.
        fits: memory needs, by stage, then by rows of a microbatch.
        data: what the data service must deliver.
        radius: how widely a batch is spread over the corpus; None for rows that are not shuffled.
        seconds: wall time of the whole run, failures included; infinite if failures are too frequent to finish.
        text_bytes: uncompressed bytes of the corpus; None if they were not given.
    """

    recipe: Recipe
    automatic: bool
    cluster: Cluster
    parameters: int
    phases: tuple[PhaseTime, ...]
    fits: tuple[MemoryNeed, ...]
    data: DataNeeds
    radius: ShuffleRadius | None
    checkpoints: CheckpointEstimate
    seconds: float
    text_bytes: float | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run. A batch-size warm-up is counted as if every step had the final batch size."""
        return sum(phase.steps * phase.rows * phase.length for phase in self.phases)

    @property
    def gpu_hours(self) -> float:
        return self.cluster.ranks * self.seconds / 3600

    @property
    def phase_with_most_memory(self) -> PhaseTime:
        """The phase whose microbatch needs the most memory."""
        return max(self.phases, key=_memory_sort_key)

    @property
    def configured_memory(self) -> MemoryNeed | None:
        """The memory at the recipe's own stage and microbatch; None if the stage does not support its precision."""
        chosen = [fit for fit in self.fits if fit.stage == self.recipe.zero]
        return max(chosen, key=lambda fit: fit.rows, default=None)

    def largest_microbatch(self, stage: Stage) -> MemoryNeed | None:
        """Return the largest microbatch that fits at `stage`, or None if none fits."""
        fitting = [fit for fit in self.fits if fit.stage == stage and fit.fits]
        return max(fitting, key=lambda fit: fit.rows, default=None)


def estimate_recipe(
    recipe: Recipe,
    cluster: Cluster,
    mfu: str | float | None = None,
    text_bytes: float | None = None,
) -> Estimate:
    """Estimate what `recipe` needs on `cluster`, and how long it takes there.

    Args:
        mfu: share of the GPU's peak that every phase reaches, or the URI of a run that recorded its share; None: the
            share of the most similar known run (`utilisation.py`).
        text_bytes: uncompressed bytes of the corpus; None if unknown.

    Raises:
        EstimateError: `mfu` is neither a share between 0 and 1 nor a run that recorded its share.
    """
    share = None if mfu is None else parse_utilisation(str(mfu))
    count = parameter_count(recipe)
    automatic = has_automatic_microbatch(recipe)
    recipe = recipe.model_copy(update={"model": with_vocab(recipe.model)})
    if automatic:
        most = rows_that_fit(RankMemory(recipe, count, cluster.ranks, "cuda"), usable_gpu_bytes(cluster.gpu.memory))
        recipe = with_microbatch_rows(recipe, cluster.ranks, most)
    phases = tuple(
        estimate_phase_time(
            recipe,
            phase,
            cluster,
            count,
            share or assume_utilisation(recipe.model, phase.length, cluster.gpu),
        )
        for phase in recipe.phases
    )
    fastest = max(phase.tokens_per_second for phase in phases)
    work = sum(phase.total_seconds for phase in phases)
    saved = _estimate_checkpoints(recipe, cluster, count, work / sum(phase.steps for phase in phases))
    return Estimate(
        recipe=recipe,
        automatic=automatic,
        cluster=cluster,
        parameters=count,
        phases=phases,
        fits=tuple(_memory_needs(recipe, cluster, count, max(phases, key=_memory_sort_key))),
        data=estimate_data_needs(recipe, recipe.model.vocabulary_size, fastest),
        radius=estimate_shuffle_radius(recipe),
        checkpoints=saved,
        seconds=work / saved.goodput_chosen if saved.goodput_chosen else float("inf"),
        text_bytes=text_bytes,
    )


def _memory_sort_key(phase: PhaseTime) -> tuple[int, int, int]:
    """Return a key that sorts phases by memory: tokens of a microbatch, length of its rows, targets of a row."""
    return phase.shape.tokens, phase.length, phase.shape.targets_per_row


def _memory_needs(recipe: Recipe, cluster: Cluster, parameter_count: int, phase: PhaseTime) -> list[MemoryNeed]:
    """Return the memory needs of a phase for each supported stage and each size of a microbatch."""
    added, fits = microbatch_memory(recipe, phase.shape), []
    for stage in STAGES:
        if not stage and recipe.precision != "fp32":
            continue
        for rows in microbatch_candidates(phase.shape.rows):
            always = fixed_memory(recipe, parameter_count, cluster.ranks, stage, rows=rows * phase.rounds)
            parts = (*always, *added.parts(rows))
            fits.append(
                MemoryNeed(stage, rows, parts, memory.total_bytes(parts) <= usable_gpu_bytes(cluster.gpu.memory))
            )
    return fits


def microbatch_candidates(rows: int) -> list[int]:
    """Return the numbers of rows to estimate: 1, 2, 4, ... below `rows`, and `rows` itself."""
    powers = [1 << i for i in range(rows.bit_length()) if 1 << i < rows]
    return [*powers, rows]


def _estimate_checkpoints(
    recipe: Recipe, cluster: Cluster, parameter_count: int, step_seconds: float
) -> CheckpointEstimate:
    size = state_bytes(recipe, parameter_count)
    of_node = size / cluster.nodes
    saving = CheckpointTimes(
        blocked=SAVE_PAUSE_S + size / cluster.ranks / GPU_TO_HOST_BYTES_S,
        behind=of_node / STORE_BYTES_S,
        restart=RESTART_S + of_node / STORE_BYTES_S,
    )
    mtbf = cluster.mtbf / cluster.nodes
    best, chosen = best_interval_s(saving, mtbf), _save_interval_s(recipe, step_seconds)
    return CheckpointEstimate(
        bytes=size,
        saving=saving,
        mtbf=mtbf,
        young=young_interval_s(saving.blocked, mtbf),
        daly=daly_interval_s(saving.blocked, mtbf),
        best=best,
        chosen=chosen,
        goodput=goodput(saving, best, mtbf),
        goodput_chosen=goodput(saving, chosen, mtbf),
    )


def _save_interval_s(recipe: Recipe, step_seconds: float) -> float:
    """Return the seconds between two saves of the recipe, if a step takes `step_seconds` seconds."""
    every = recipe.checkpoint.every
    by_steps = every.steps * step_seconds if every.steps is not None else float("inf")
    by_minutes = 60 * every.minutes if every.minutes is not None else float("inf")
    return min(by_steps, by_minutes)
