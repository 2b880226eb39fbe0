"""The learning rate as a pure function of the step: warmup, stable rate, decay. A schedule spans a run or a phase."""

import math
from typing import Literal, Self, assert_never

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator


class ScheduleConfig(BaseModel):
    """Linear warmup, constant peak rate until the last `decay_steps`, then decay to the end of the run or phase.

    Attributes:
        warmup: number of steps in which the rate rises linearly from 0 to its peak.
        decay: shape of the decay: constant, linear, polynomial (`power`), cosine, one_minus_sqrt or inverse_sqrt.
            one_minus_sqrt is 1 - sqrt(elapsed share of the decay), the best shape that Hägele et al. 2024 (section 4)
            found after a long constant rate. inverse_sqrt is peak * sqrt(warmup / (step + 1)), which decays without
            end (Vaswani et al. 2017, section 5.3).
        power: exponent of the polynomial; 1 is linear.
        floor: final rate of the decay, as a share of the peak.
        decay_steps: number of steps of the decay, at the end; the steps between warmup and decay have the peak rate.
            None: the decay begins after the warmup.
        restarts: number of times that the decay restarts at the peak, in cycles of equal length (Loshchilov and
            Hutter 2017, section 3).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    warmup: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "polynomial", "cosine", "one_minus_sqrt", "inverse_sqrt"] = "linear"
    power: float = Field(default=1.0, gt=0.0)
    floor: float = Field(default=0.0, ge=0.0, lt=1.0)
    decay_steps: PositiveInt | None = None
    restarts: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check_decay_settings(self) -> Self:
        if self.decay == "constant" and (self.decay_steps is not None or self.restarts):
            unused = "restarts" if self.decay_steps is None else "decay_steps"
            raise ValueError(f"{unused} is given, but a constant rate does not decay; choose a decay")
        if self.decay == "inverse_sqrt" and (self.decay_steps is not None or self.restarts or self.floor):
            unused = "decay_steps" if self.decay_steps is not None else "restarts" if self.restarts else "floor"
            raise ValueError(f"{unused} is given, but decay inverse_sqrt does not use it; choose another decay")
        return self

    @property
    def least_steps(self) -> int:
        """The smallest number of steps into which warmup and decay fit."""
        return self.warmup + (self.decay_steps or 0)


def learning_rate(config: ScheduleConfig, *, peak: float, total: int, step: int) -> float:
    """Return the learning rate in step `step` (from 0) of the `total` steps that the schedule spans.

    No step has rate 0. After a warmup of W steps, step 0 has peak / W, steps W - 1 and W have the peak, and the last
    step is one decrement above the floor, as in fairseq's polynomial_decay. (In google-research/bert rates come one
    step later, and the decay is counted from step 0 rather than from the end of warmup.)
    """
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.decay == "inverse_sqrt":
        return peak * math.sqrt(max(1, config.warmup) / (step + 1))
    span = total - config.warmup if config.decay_steps is None else config.decay_steps
    left = _cycle_share_left(config.restarts, step - (total - span), max(1, span))
    return peak * (config.floor + (1.0 - config.floor) * _decayed_rate_share(config, left))


def schedule_parts(config: ScheduleConfig, total: int) -> list[tuple[int, str]]:
    """Return (first step, name) of each part of a schedule over `total` steps: warmup, stable, and each decay cycle."""
    span = total - config.warmup if config.decay_steps is None else config.decay_steps
    found = [(0, "warmup")] if config.warmup else []
    if config.decay == "constant" or span < total - config.warmup:
        found.append((config.warmup, "stable"))
    if config.decay != "constant":
        starts = (_cycle_start(config.restarts, cycle, span) for cycle in range(config.restarts + 1))
        found += [(total - span + start, config.decay) for start in starts]
    return [(step, name) for step, name in found if step < total]


def _cycle_share_left(restarts: int, done: int, span: int) -> float:
    """Return the remaining share of the current cycle, `done` steps into a decay of `span` steps; 1 before the decay,
    0 after it.
    """
    if done < 0:
        return 1.0
    if done >= span:
        return 0.0
    cycle = done * (restarts + 1) // span
    first, end = (_cycle_start(restarts, number, span) for number in (cycle, cycle + 1))
    return 1.0 - (done - first) / (end - first)


def _cycle_start(restarts: int, cycle: int, span: int) -> int:
    """Return the first step of a cycle, counted from the start of a decay of `span` steps. Cycle lengths differ by at
    most one step.
    """
    return -(-cycle * span // (restarts + 1))


def _decayed_rate_share(config: ScheduleConfig, left: float) -> float:
    """Return the rate as a share, from 1 (peak) to 0 (floor), when the share `left` of the decay cycle remains."""
    match config.decay:
        case "constant":
            return 1.0
        case "linear":
            return left
        case "polynomial":
            return float(left**config.power)
        case "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * left))
        case "one_minus_sqrt":
            return 1.0 - math.sqrt(1.0 - left)
        case "inverse_sqrt":
            raise AssertionError("inverse_sqrt is computed by learning_rate")
        case _ as never:
            assert_never(never)
