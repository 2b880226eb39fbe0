"""The contract of a term of the loss. README.md, "Terms", says how to write one.

A term has two sides in one file of this folder: its description (`TermConfig`: what a recipe says, and what the term
cannot go together with), and its device half, which the description makes: heads on the states of a network that
terms share (`HeadTerm`), or a whole module around it (`ModuleConfig`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxtyping import Int, Num
from pydantic import BaseModel, ConfigDict, model_serializer
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.build import ModelConfig
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.losses import ObjectiveModule
from encoder_core.objectives.states import States
from encoder_core.objectives.weights import Weight, last_weight

Label = Literal["next", "order"]
"""What a row's label says: whether its second segment follows the first, or whether the two are in order."""


@dataclass(frozen=True)
class RowFacts:
    """What rows are like, as far as terms care.

    Attributes:
        packing: the name of how they are cut, for messages.
        label: of each row; None for rows without one.
        texts: a row holds several whole texts, in which nothing is masked.
        lanes: a row goes on where its lane's row of the step before ended.
        unit: what is masked at once: token, whole_word, ngram, span.
    """

    packing: str
    label: Label | None = None
    texts: bool = False
    lanes: bool = False
    unit: str = "token"


@dataclass(frozen=True)
class Setting:
    """What a term finds around it.

    Attributes:
        model: of the network that is used after pretraining.
        terms: all of the objective, by name.
        rows: None where they are not known.
    """

    model: ModelConfig
    terms: Mapping[str, "TermConfig"]
    rows: RowFacts | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a term cannot be trained here. `path`: the place in the recipe that is to be changed."""

    path: tuple[str, ...]
    what: str
    remedy: str


class TermConfig(BaseModel, ABC):
    """A term as a recipe describes it. A subclass is frozen, and refuses unknown keys.

    Attributes:
        weight: of the term's mean loss in the whole loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: Weight = 1.0

    @abstractmethod
    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Every reason why this term cannot be trained in `setting`, none if it can."""


class LateWeight(TermConfig):
    """A term that had no weight at first: a weight of 1 stays out of what is written, so recipes, fingerprints and the
    keys of evaluations stay as they were."""

    @model_serializer(mode="wrap")
    def _unspoken(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "weight" or value != 1.0}


@dataclass(frozen=True)
class TermSums:
    """A term on one microbatch.

    Attributes:
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands; the same as `HeadTerm.targets` of the batch.
        metrics: sums by their own names ("correct"), scalars without gradient. Which figures are made of them, see
            `encoder_core/train/metrics.py`.
        drawn: an id for each target, where `States.temperature` asks the masked-token term for them.
    """

    loss_sum: Num[Tensor, ""]
    targets: int
    metrics: Mapping[str, Num[Tensor, ""]] = field(default_factory=dict)
    drawn: Int[Tensor, " targets"] | None = None


Reads = Literal["targets", "first", "all", "layers"]
"""The states a term reads: those of the batch's targets, of rows' first tokens, or of any tokens; or of all layers."""


class HeadTerm(ABC):
    """The device half of a term that shares one network's encoder with others. Not a module: the network owns `heads`,
    under the names that their parameters have in checkpoints.

    A head without targets still runs, on no rows, so that every parameter takes part in the backward pass on every
    rank. A head may be a frozen network of the term's own (`requires_grad_(False)`, and a `train` that keeps it in
    evaluation mode). The engine gives it neither master weights nor moments.

    Attributes:
        name: of the term; key of `target_counts`, and what its figures are called.
        weight: of a schedule where it ends; the trainer has the weight of each step.
        reads: which states; decides how much of DeBERTa's last layer runs.
        heads: trained with the term, by name.
    """

    reads: ClassVar[Reads]

    def __init__(self, name: str, weight: Weight, heads: Mapping[str, nn.Module]) -> None:
        self.name = name
        self.weight = last_weight(weight)
        self.heads = heads

    def meet(self, others: Mapping[str, "HeadTerm"]) -> None:
        """Is told of all terms that share the network, itself among them, by name, before the first batch. For a term
        that uses another's head or outcome; most have no use for it."""
        return

    @abstractmethod
    def targets(self, batch: Batch) -> int:
        """How many summands the term has for this batch, known before the forward pass."""

    @abstractmethod
    def sums(self, states: States, batch: Batch) -> TermSums:
        """The term on the network's states of the batch."""


class HeadConfig(TermConfig):
    """The description of a term that shares one network's encoder with others."""

    @abstractmethod
    def device(self, model: ModelConfig, word: nn.Embedding) -> HeadTerm:
        """The device half on a network of `model`, whose word embeddings are `word`; its heads on the default device,
        weights not yet initialised."""


class ModuleConfig(TermConfig):
    """The description of a term that decides what the whole module is: a second network, another encoder's streams, or
    a loss that couples all examples of a step. An objective has at most one of them."""

    @abstractmethod
    def module(
        self,
        model: ModelConfig,
        heads: Sequence[HeadConfig],
        *,
        checkpoint_activations: bool = False,
        attend: Attend = automatic,
    ) -> ObjectiveModule:
        """The module that trains this term and `heads`, on the default device; weights not yet initialised."""


class AroundConfig(ModuleConfig):
    """The description of a term that makes a module by itself, and beside others is added to the module they make."""

    @abstractmethod
    def around(self, module: ObjectiveModule, model: ModelConfig) -> ObjectiveModule:
        """What trains this term and those of `module`, whose parameters keep their names."""
