"""The loss-spike policy: which updates are skipped, when a run returns to an earlier checkpoint, and when it ends. Its
functions are pure functions of the run's losses and gradient norms.

A step is bad if it made no update, or if its loss is far above the recent losses of its phase. A single bad step is
ignored. After many in a row the run returns to an earlier checkpoint and skips the data it has read since, as was done
by hand for PaLM (Chowdhery et al. 2022, section 5.1: about 100 steps back, 200 to 500 batches skipped, about 20 times).

Recent losses are those of the last `window` steps that were not bad, so that a spike does not become the standard. "Far
above" is measured by the median and the median absolute deviation (MAD), which single outliers hardly move. All ranks
have the same losses and norms, so all decide alike. Checkpoints store them, so a resume changes no decision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pydantic import Field, PositiveInt, TypeAdapter

from checkpoints.layout import CheckpointName
from checkpoints.listing import Rewind
from data_service.formats import StrictRecord
from launcher.runtime.policies.failures import StopDecision

LOSS = "loss"  # name of the loss among the figures of a step; the others are gradient norms
_MAD_TO_SIGMA = 1.4826  # standard deviation / MAD of a normal distribution
# Smallest standard deviation, as a share of the median: if losses hardly vary, a tiny rise must not count as a spike.
_MIN_SPREAD_SHARE = 0.01


class Spikes(StrictRecord):
    """Settings of the reaction to loss spikes: losses that are not finite, or far above recent losses.

    Attributes:
        window: number of recent steps that a loss is compared with. Until a phase has had this many steps, no finite
            loss is a spike.
        threshold: a loss more than this many standard deviations above the median is a spike. The deviation is
            estimated from the median absolute deviation. Null: no finite loss is a spike.
        outlier: the update is skipped if the loss or the gradient norm is more than this many standard deviations
            above its median. Null: it is skipped only if one of them is not finite, as in the papers.
        patience: after this many bad steps in a row (high loss, or no update) the run goes back, to a checkpoint at
            least this many steps older than the first bad step.
        most_rewinds: after this many rewinds in a row the run ends instead of going back again. Rewinds are in a row
            if each spike begins within `window` steps of the point where the run last went back.
    """

    window: int = Field(default=128, ge=4)
    threshold: float | None = Field(default=10.0, gt=0)
    outlier: float | None = Field(default=None, gt=0)
    patience: PositiveInt = 10
    most_rewinds: int = Field(default=3, ge=0)

    def latest_rewind_step(self, began: int) -> int:
        """Return the step of the newest checkpoint to which a run may go back after a spike that began at step
        `began`."""
        return began - self.patience


@dataclass(frozen=True)
class SpikeHistory:
    """The recent losses and gradient norms of a run, with which its next step is compared.

    Attributes:
        phase: the present phase. Losses of different phases are not compared, because their data differ.
        series: values of the last steps that were not bad, the oldest first, by name (`loss`, gradient norms).
        since: first of the latest bad steps in a row; None if the last step was not bad.
    """

    phase: int = 0
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    since: int | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _HISTORY_TYPE.dump_python(self, mode="json")
        return found

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "SpikeHistory":
        return _HISTORY_TYPE.validate_python(data)


_HISTORY_TYPE = TypeAdapter(SpikeHistory)  # converts to and from JSON


def upper_bound(values: Sequence[float], window: int, deviations: float | None) -> float:
    """Return the limit above which the next value after `values` is an outlier.

    The limit is the median of the last `window` values plus `deviations` standard deviations. It is infinite if
    `deviations` is None or there are fewer than `window` values.
    """
    if deviations is None or len(values) < window:
        return math.inf
    recent = values[-window:]
    middle = median(recent)
    spread = _MAD_TO_SIGMA * median(abs(value - middle) for value in recent)
    return middle + deviations * max(spread, _MIN_SPREAD_SHARE * abs(middle))


def max_allowed_figure(settings: Spikes, recent: SpikeHistory, phase: int, name: str) -> float:
    """Return the largest value of `name` (`loss` or a gradient norm) with which a step of `phase` makes its update."""
    return _figure_limit(settings, recent, phase, name, settings.outlier)


def next_history(
    settings: Spikes,
    recent: SpikeHistory,
    phase: int,
    step: int,
    figures: Mapping[str, float],
    *,
    updated: bool,
) -> SpikeHistory:
    """Return `recent` with the finished step `step` added.

    Args:
        figures: values of the step by name: its loss, under `LOSS`, and every other value for which
            `max_allowed_figure` gives a limit.
        updated: whether the step made all its updates.
    """
    high = figures[LOSS] > _figure_limit(settings, recent, phase, LOSS, settings.threshold)
    if high or not updated or not all(map(math.isfinite, figures.values())):
        return replace(recent, since=step if recent.since is None else recent.since)
    before = recent.series if recent.phase == phase else {}
    series = {name: (*before.get(name, ()), value)[-settings.window :] for name, value in figures.items()}
    return SpikeHistory(phase, series)


def should_go_back(settings: Spikes, recent: SpikeHistory, steps: int) -> bool:
    """Return whether the run, which has done `steps` steps, should return to an earlier checkpoint."""
    return recent.since is not None and steps - recent.since >= settings.patience


def describe_bad_step(recent: SpikeHistory, loss: float, grad_norm: float) -> str:
    """Return, as text for the operator, what is wrong with a bad step."""
    if not math.isfinite(loss):
        return "losses that are not finite"
    if not math.isfinite(grad_norm):
        return "gradients that are not finite"
    usual = recent.series.get(LOSS)
    measure = f", after losses of {median(usual):.4g}" if usual else ""
    return f"a loss of {loss:.4g} with a gradient norm of {grad_norm:.3g}{measure}"


@dataclass(frozen=True)
class SpikeVerdict:
    """What to do after a spike.

    Attributes:
        to: the checkpoint to go back to; None if no checkpoint is old enough.
        stop: why the run ends instead; None if it goes back.
    """

    to: CheckpointName | None
    stop: StopDecision | None


def decide_after_spike(
    settings: Spikes,
    first_bad_step: int,
    cause: str,
    history: Sequence[CheckpointName],
    past_rewinds: Sequence[Rewind],
) -> SpikeVerdict:
    """Return what to do after a spike that began with step `first_bad_step`.

    Args:
        cause: text of `describe_bad_step`.
        history: the run's checkpoints, except those that earlier rewinds abandoned.
        past_rewinds: earlier rewinds, the oldest first.
    """
    latest = settings.latest_rewind_step(first_bad_step)
    to = max((mark for mark in history if mark.step <= latest), key=lambda mark: mark.step, default=None)
    what = f"{cause}, from step {first_bad_step:,} on"
    if to is None:
        reason = f"{what}, and no checkpoint is {settings.patience} or more steps older, so the run cannot go back"
        return SpikeVerdict(None, StopDecision(reason, _NO_CHECKPOINT_ADVICE))
    times = _rewinds_in_a_row(settings, first_bad_step, past_rewinds)
    if times >= settings.most_rewinds:
        reason = f"{what}, after going back {times} times in a row"
        return SpikeVerdict(to, StopDecision(reason, _REPEATED_SPIKE_ADVICE.format(step=to.step)))
    return SpikeVerdict(to, None)


_NO_CHECKPOINT_ADVICE = (
    "start a new run with a lower learning rate or a longer warm-up, or look at the data with `maskfleet show`; "
    "`spikes` in the recipe says what counts as bad"
)
_REPEATED_SPIKE_ADVICE = (
    "look for the cause: learning rate, precision, data (`maskfleet show`), a machine that computes wrongly. The same "
    "command continues from step {step:,} and leaves out the data read since; a fork of that step can change settings"
)


def _rewinds_in_a_row(settings: Spikes, began: int, past_rewinds: Sequence[Rewind]) -> int:
    """Return how many rewinds in a row preceded a spike that began at step `began`: rewinds are in a row if each spike
    began at most `window` steps after the step from which the run last went back."""
    times = 0
    for rewind in reversed(past_rewinds):
        if rewind.to is None or began > rewind.reached + settings.window:
            break
        times, began = times + 1, rewind.began
    return times


def _figure_limit(settings: Spikes, recent: SpikeHistory, phase: int, name: str, deviations: float | None) -> float:
    """Return `upper_bound` of the recent values of `name`; infinite if they are those of an earlier phase."""
    values = recent.series.get(name, ()) if recent.phase == phase else ()
    return upper_bound(values, settings.window, deviations)
