"""The interface of an objective's module. It returns sums, not means, because only the trainer knows the number of
targets of the whole step."""

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
        name: key of `target_counts`, and prefix of metrics.
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands of `loss_sum`.
        weight: the term's constant weight, or a schedule's final weight; the trainer knows each step's weight.
        part: name of the recipe's term, if that yields several terms (Matryoshka widths); None: `name`.
    """

    name: str
    loss_sum: Num[Tensor, ""]
    targets: int
    weight: float = 1.0
    part: str | None = None

    def step_weight(self, weights: Mapping[str, float]) -> float:
        """Return the term's weight in a step. `weights`: the step's scheduled weights, by name of the recipe's term."""
        return weights.get(self.part or self.name, self.weight)


@dataclass(frozen=True)
class LossSums:
    """The loss terms of one microbatch, and sums for metrics.

    Attributes:
        terms: the loss terms.
        metrics: sums by name, such as "mlm_correct", scalars without gradient; see `objectives/figures.py`.
        memory: tensors to pass to the module's next call with the same microbatch: for the step's next update group, or
            in the next step (XLNet: cached states). Empty for most objectives.
    """

    terms: tuple[Term, ...]
    metrics: dict[str, Num[Tensor, ""]] = field(default_factory=dict)
    memory: tuple[Tensor, ...] = ()


class ObjectiveModule(nn.Module, ABC):
    """Base of the module that the engine wraps: networks and losses, called with a batch, returning `LossSums`.

    If it has returned `memory` for a microbatch, its next call gets the memory as second argument.
    """

    def update_groups(self) -> UpdateGroups:
        """Return the parameters that each update of a step changes, by name and in order of the updates. By default one
        update changes all parameters.

        The module is called once for each update, first without memory, then with the memory of the previous call.
        """
        return {ALL_PARAMETERS: list(self.parameters())}

    @abstractmethod
    def target_counts(self, batch: Batch) -> dict[str, int]:
        """Return each term's number of targets in this batch, without a forward pass."""


class AllExamples(ABC):
    """Gathers examples from all ranks, in an order that does not depend on the number of ranks."""

    at: Int[Tensor, " own"]
    """Indices of this rank's examples among all."""

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """Return the tensor [N, ...] of all examples, given this rank's [n, ...]. Collective."""


class CoupledObjective(ObjectiveModule):
    """An objective whose loss of an example depends on all examples of the global batch.

    A step runs twice over its microbatches. In the first pass, without gradients, the module is called without memory,
    and returns no terms and one tensor [examples, ...] as memory. `couple` combines these tensors. In the second pass
    the module is called with the result of `couple` as memory. Both passes draw the same random numbers.
    """

    @abstractmethod
    def couple(self, own: Tensor, examples: AllExamples) -> tuple[Tensor, ...]:
        """Return tensors [n, ...], whose rows belong to this rank's n examples of a step. Collective.

        `own`: the concatenated memories of this rank's microbatches. The second pass passes to each microbatch its rows
        of the returned tensors.
        """

    @abstractmethod
    def losses(self, own: Tensor, coupled: tuple[Tensor, ...]) -> LossSums:
        """Return the sums over some examples. `own`: their rows of the first pass's memory. `coupled`: their rows of
        the tensors that `couple` has returned.
        """
