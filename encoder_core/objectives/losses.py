"""What an objective is, what it returns, and what a term weighs.

An objective returns sums, not means: only the trainer knows the targets of the whole step. The weight of a term is a
number, or a function of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from jaxtyping import Int, Num
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.optim.groups import UpdateGroups
from encoder_core.optim.updates import WHOLE


@dataclass(frozen=True)
class Term:
    """One term of the loss on one microbatch.

    The step's loss is the sum over terms of weight * (sum of loss_sum) / (sum of targets), both sums over all
    microbatches of all ranks.

    Attributes:
        name: key of `target_counts`, and of the metric it is reported under.
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands.
        weight: factor of the term in the loss. Of a schedule, where it ends: a trainer has the weight of each step.
        part: the name in a recipe of the term that it is part of, where that has several; None where it is `name`.
    """

    name: str
    loss_sum: Num[Tensor, ""]
    targets: int
    weight: float = 1.0
    part: str | None = None

    def weight_in(self, weights: Mapping[str, float]) -> float:
        """Its weight under `weights` of a recipe's terms by name; its own where they do not say."""
        return weights.get(self.part or self.name, self.weight)


@dataclass(frozen=True)
class LossSums:
    """All terms of one microbatch, and sums for metrics.

    `metrics` maps a name such as "mlm_correct" to a scalar without gradient; it is divided by the targets of
    the term that its name begins with. `memory` is what the module wants back with the same microbatch: for the
    next update group of this step, or in the next step (XLNet: the states of the rows' last tokens). Empty for most.
    """

    terms: tuple[Term, ...]
    metrics: dict[str, Num[Tensor, ""]] = field(default_factory=dict)
    memory: tuple[Tensor, ...] = ()


class ObjectiveModule(nn.Module, ABC):
    """Networks and losses as the one module that the engine wraps: batch to `LossSums`.

    A module that returned `memory` for a microbatch is called with it as second argument.
    """

    def update_groups(self) -> UpdateGroups:
        """The updates of one step, by name and in order, and the parameters that each of them moves. By default one
        update moves all parameters.

        With several groups the module is called once for each: for the first group without memory, then with the memory
        that the call before returned.
        """
        return {WHOLE: list(self.parameters())}

    @abstractmethod
    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""


class AllExamples(ABC):
    """The examples of all ranks, in an order that does not depend on the ranks; and which of them are this rank's."""

    at: Int[Tensor, " own"]
    """Where the own examples lie among all."""

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """All examples' [N, ...] from each rank's own [n, ...]. Collective."""


class CoupledObjective(ObjectiveModule):
    """An objective whose loss of an example depends on all examples of the global batch.

    A step runs twice over its microbatches. In the first pass there is no graph; the module is called without memory,
    and returns no terms, and one tensor [examples, ...] as memory. `couple` takes these tensors. In the second pass the
    module is called with what `couple` returned as memory. Both passes draw the same random numbers.
    """

    @abstractmethod
    def couple(self, own: Tensor, everyone: AllExamples) -> tuple[Tensor, ...]:
        """Tensors [n, ...] for the n own examples of a step, from `own`: their microbatches' memories joined.

        The second pass calls each microbatch with its rows of them. Collective.
        """

    @abstractmethod
    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        """Sums over this rank's examples, from both passes: the `own` tensor, and its rows of what `couple`
        returned.
        """


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
