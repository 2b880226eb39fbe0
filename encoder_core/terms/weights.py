"""The weights of terms: a number, or a function of the step."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class WeightSchedule(BaseModel):
    """A weight that changes linearly from `start` to `end` in `steps` steps, and then stays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: float = Field(ge=0)
    end: float = Field(ge=0)
    steps: PositiveInt

    @model_validator(mode="after")
    def _weighs_something(self) -> "WeightSchedule":
        if not self.start and not self.end:
            raise ValueError("the weight would be 0 in every step; leave the term out")
        return self


Weight = Annotated[float, Field(gt=0)] | WeightSchedule
"""The weight of a term. A schedule counts the steps of the run, or those of the phase that sets it."""


def weight_at(weight: Weight, step: int) -> float:
    """Return the weight in step number `step`, counted from 0: step 0 has a schedule's `start`, step `steps` its
    `end`.
    """
    if not isinstance(weight, WeightSchedule):
        return weight
    done = min(step, weight.steps) / weight.steps
    return weight.start + (weight.end - weight.start) * done


def last_weight(weight: Weight) -> float:
    """Return the weight of a term in held-out losses: a constant weight, or a schedule's final
    weight, at every step."""
    return weight.end if isinstance(weight, WeightSchedule) else weight
