"""What an objective is, and what it returns: sums, not means, because only the trainer knows the targets of the whole
step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int, Num
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.optim.groups import UpdateGroups
from encoder_core.optim.updates import ALL_PARAMETERS


@dataclass(frozen=True)
class Term:
    """One term of the loss on one microbatch.

    The step's loss is the sum over terms of weight * (sum of loss_sum) / (sum of targets), both sums over all
    microbatches of all ranks.

    Attributes:
        name: key of `target_counts`, and of the metrics.
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands.
        weight: factor of the term in the loss. For a schedule it is the final weight; a trainer has the weight of
            each step.
        part: name of the recipe's term to which it belongs, if that has several; None: `name`.
    """

    name: str
    loss_sum: Num[Tensor, ""]
    targets: int
    weight: float = 1.0
    part: str | None = None

    def step_weight(self, weights: Mapping[str, float]) -> float:
        """Return the term's weight under `weights` of a recipe's terms by name; its own weight if they do not have
        it.
        """
        return weights.get(self.part or self.name, self.weight)


@dataclass(frozen=True)
class LossSums:
    """All terms of one microbatch, and sums for metrics.

    Attributes:
        terms: the terms.
        metrics: scalars without gradient by name, such as "mlm_correct"; each is divided by the targets of the term
            with which its name begins.
        memory: tensors that the module needs again with the same microbatch: for the next update group of this step,
            or in the next step (XLNet: the states of the rows' last tokens). Empty for most objectives.
    """

    terms: tuple[Term, ...]
    metrics: dict[str, Num[Tensor, ""]] = field(default_factory=dict)
    memory: tuple[Tensor, ...] = ()


class ObjectiveModule(nn.Module, ABC):
    """Networks and losses as the one module that the engine wraps: batch to `LossSums`.

    A module that returned `memory` for a microbatch is called with it as second argument.
    """

    def update_groups(self) -> UpdateGroups:
        """Return the updates of one step, by name and in order, with the parameters that each changes. By default one
        update changes all.

        With several groups the module is called once for each: for the first group without memory, then with the
        memory that the previous call returned.
        """
        return {ALL_PARAMETERS: list(self.parameters())}

    @abstractmethod
    def target_counts(self, batch: Batch) -> dict[str, int]:
        """Return how many summands each term has for this batch; known before the forward pass."""


class AllExamples(ABC):
    """The examples of all ranks, in an order that does not depend on the ranks; and which of them are this rank's."""

    at: Int[Tensor, " own"]
    """Indices of the own examples among all."""

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """Return all examples' [N, ...] from each rank's own [n, ...]. Collective."""


class CoupledObjective(ObjectiveModule):
    """An objective whose loss of an example depends on all examples of the global batch.

    A step runs twice over its microbatches. The first pass has no graph: the module is called without memory, and
    returns no terms, and one tensor [examples, ...] as memory. `couple` takes these tensors. In the second pass the
    module is called with the result of `couple` as memory. Both passes draw the same random numbers.
    """

    @abstractmethod
    def couple(self, own: Tensor, examples: AllExamples) -> tuple[Tensor, ...]:
        """Return tensors [n, ...] for the n own examples of a step, from `own`: their microbatches' memories joined.
        Collective.

        The second pass calls each microbatch with its rows of them.
        """

    @abstractmethod
    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        """Return sums over this rank's examples from both passes: from the `own` tensor, and its rows of what
        `couple` returned.
        """
