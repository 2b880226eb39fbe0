"""The learning rate as a pure function of the step. One schedule spans all phases of a run."""

import math
from typing import Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field


class ScheduleConfig(BaseModel):
    """Linear warmup, then decay to the end of the run.

    Attributes:
        warmup: steps that raise the rate from 0 to its peak, the same amount each.
        decay: constant, linear, polynomial (`power`) or cosine, over the steps after warmup.
        power: exponent of the polynomial; 1 is linear.
        floor: the rate decays towards this share of the peak.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    warmup: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "polynomial", "cosine"] = "linear"
    power: float = Field(default=1.0, gt=0.0)
    floor: float = Field(default=0.0, ge=0.0, lt=1.0)


def learning_rate(config: ScheduleConfig, *, peak: float, total: int, step: int) -> float:
    """The rate of step number `step`, counted from 0, of `total` steps over all phases.

    No step is spent at rate 0: step 0 of a warmup of W has peak / W, steps W - 1 and W have the peak, and the
    last step is one notch above the floor. (fairseq's polynomial_decay; google-research/bert is one step
    behind, and decays from step 0 rather than from the end of warmup.)
    """
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    left = max(0.0, 1.0 - (step - config.warmup) / max(1, total - config.warmup))
    return peak * (config.floor + (1.0 - config.floor) * _remaining(config, left))


def _remaining(config: ScheduleConfig, left: float) -> float:
    """Share of the peak above the floor, when `left` of the decay's steps are left."""
    match config.decay:
        case "constant":
            return 1.0
        case "linear":
            return left
        case "polynomial":
            return float(left**config.power)
        case "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * left))
        case _ as never:
            assert_never(never)
