"""The weight of a term in the loss: a number, or a function of the step."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class WeightSchedule(BaseModel):
    """A weight that goes in a straight line from `start` to `end` in `steps` steps, and stays there."""

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
"""Of a term beside the others; of a schedule, the steps of the run count, or those of the phase that sets it."""


def weight_at(weight: Weight, step: int) -> float:
    """The weight in step number `step`, counted from 0: step 0 has a schedule's `start`, step `steps` its `end`."""
    if not isinstance(weight, WeightSchedule):
        return weight
    done = min(step, weight.steps) / weight.steps
    return weight.start + (weight.end - weight.start) * done


def last_weight(weight: Weight) -> float:
    """The number, or where the schedule ends: what held-out losses are weighed by, in every step."""
    return weight.end if isinstance(weight, WeightSchedule) else weight
