"""The contract of a term of the loss, and the states of one network that several terms read.

A term has two sides in one file of this folder. Its description (`TermConfig`) is what a recipe says, what the term
cannot go together with, and what it costs. It makes the device half: heads on the states of a network that terms share
(`HeadTerm`), or a whole module around it (`ModuleConfig`). The package's README, "Terms", says how to write one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from jaxtyping import Float, Int, Num
from pydantic import BaseModel, ConfigDict, model_serializer
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.saved import Kernel
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import AnyEncoder, ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.heads.prediction import EnhancedMaskDecoder
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.losses import ObjectiveModule, Weight, last_weight


class States:
    """The hidden states of one batch, each computed when a term first asks for it.

    DeBERTa's last layer runs for all tokens only if some term needs that, or several read its output. Otherwise it runs
    for the tokens that are asked for.

    Attributes:
        layered: some term reads the states of all layers, which are kept then.
        temperature: an id is to be drawn for every target, at this temperature; None for none.
    """

    def __init__(
        self,
        encoder: AnyEncoder,
        decoder: EnhancedMaskDecoder | None,
        batch: Batch,
        *,
        whole: bool,
        layered: bool = False,
        temperature: float | None = None,
    ) -> None:
        self._encoder, self._decoder, self._batch, self._whole = encoder, decoder, batch, whole
        self._layered = layered
        self.temperature = temperature

    @cached_property
    def everywhere(self) -> Float[Tensor, "tokens hidden"]:
        """The last layer's output."""
        if self._layered:
            return self.layers[-1]
        if self._decoder is None:
            last_TH: Tensor = self._encoder(self._batch)
            return last_TH
        return self._last_two[1]

    @cached_property
    def layers(self) -> tuple[Float[Tensor, "tokens hidden"], ...]:
        """The embeddings, and the output of each layer."""
        assert not isinstance(self._encoder, TwoStreamEncoder)  # whose tokens no such term predicts
        return tuple(self._encoder.states(self._batch))

    def at(
        self, at_N: Int[Tensor, " positions"], most: int | None = None
    ) -> Float[Tensor, "positions hidden"]:
        """The last layer's output at sorted flat positions; `most` of them in a row, where those are no targets."""
        if self._whole or not isinstance(self._encoder, DisentangledEncoder):
            return self.everywhere.index_select(0, at_N)
        if self._decoder is None:
            return self._encoder.at(at_N, self._batch, most)
        before_TH = self._before_last
        queries_NH = before_TH.index_select(0, at_N)
        return self._encoder.look_again(queries_NH, at_N, before_TH, self._batch, most=most)

    @cached_property
    def at_targets(self) -> Float[Tensor, "targets hidden"]:
        """What hidden tokens are predicted from: the last layer's output there, or the mask decoder's."""
        return self.predicting(self._batch)

    def predicting(self, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """The same for other targets: those of `batch`, whose rows are this batch's."""
        if self._decoder is None:
            return self.at(batch.target_positions)
        assert isinstance(self._encoder, DisentangledEncoder)  # only this family has the decoder
        return self._decoder.decode(self._encoder, self._before_last, batch)

    @cached_property
    def _before_last(self) -> Tensor:
        assert isinstance(self._encoder, DisentangledEncoder)
        return self._last_two[0] if self._whole else self._encoder.before_last(self._batch)

    @cached_property
    def _last_two(self) -> tuple[Tensor, Tensor]:
        if self._layered:
            return self.layers[-2], self.layers[-1]
        *_, before_TH, last_TH = self._encoder.states(self._batch)
        assert isinstance(before_TH, Tensor)
        assert isinstance(last_TH, Tensor)
        return before_TH, last_TH


Label = Literal["next", "order"]
"""What a row's label says: whether its second segment follows the first, or whether the two are in order."""


@dataclass(frozen=True)
class RowFacts:
    """What rows are like, as far as terms care.

    Attributes:
        packing: the name of how they are cut, for messages.
        label: of each row; None for rows without one.
        texts: of a row that holds several whole texts, in which nothing is masked; 0 for rows of running text.
        repeats: those texts are one text.
        lanes: a row goes on where its lane's row of the step before ended.
        reuse: tokens that it begins with once more.
        unit: what is masked at once: token, whole_word, ngram, span.
    """

    packing: str
    label: Label | None = None
    texts: int = 0
    repeats: bool = False
    lanes: bool = False
    reuse: int = 0
    unit: str = "token"


@dataclass(frozen=True)
class PhaseFacts:
    """What terms look at in a phase: tokens of its longest row, and rows of a step, None where tokens are counted."""

    length: int
    rows: int | None


@dataclass(frozen=True)
class Setting:
    """What a term finds around it.

    Attributes:
        model: of the network that is used after pretraining.
        terms: all of the objective, by name.
        rows: None where they are not known.
        phases: of the run; empty where they are not known.
    """

    model: ModelConfig
    terms: Mapping[str, "TermConfig"]
    rows: RowFacts | None = None
    phases: tuple[PhaseFacts, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a term cannot be trained here. `path`: the place in the recipe that is to be changed."""

    path: tuple[str | int, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class SmallObjective:
    """What a recipe's terms are shrunk to, as its model is.

    Attributes:
        length: of the longest row, in tokens.
        hidden: width of the small model.
        model: the small form of another model, such as a teacher.
    """

    length: int
    hidden: int
    model: Callable[[ModelConfig], ModelConfig]


class TermConfig(BaseModel, ABC):
    """A term as a recipe describes it. A subclass is frozen, and refuses unknown keys.

    Attributes:
        name: the key in a recipe, and what the term's figures are called.
        exported: which of the heads that transformers has classes for it trains; None for another head, or none.
        weight: of the term's mean loss in the whole loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    exported: ClassVar[Heads | None] = None

    weight: Weight = 1.0

    @abstractmethod
    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Every reason why this term cannot be trained in `setting`, none if it can."""

    def small(self, form: SmallObjective) -> "TermConfig":
        """This term for a small model and short rows: only settings that depend on their size change."""
        return self

    def scored(self, shape: Shape) -> int:
        """Tokens of a microbatch for which the vocabulary's logits are computed."""
        return 0


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
        reads: which states.
        heads: trained with the term, by name.
    """

    def __init__(self, config: "HeadConfig", heads: Mapping[str, nn.Module]) -> None:
        self.name = config.name
        self.weight = last_weight(config.weight)
        self.reads = config.reads
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
    """The description of a term that shares one network's encoder with others.

    Attributes:
        reads: which states; decides how much of DeBERTa's last layer runs.
    """

    reads: ClassVar[Reads]

    @abstractmethod
    def device(self, model: ModelConfig, word: nn.Embedding) -> HeadTerm:
        """The device half on a network of `model`, whose word embeddings are `word`; its heads on the default device,
        weights not yet initialised."""

    @abstractmethod
    def products(self, states: CountedStates) -> Iterator[Product]:
        """What is multiplied for this term on one microbatch, beside the encoder: what it asks of the states, and its
        heads."""

    @abstractmethod
    def keeps(self, states: CountedStates) -> Activations:
        """What of that is kept for the backward pass."""


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

    @abstractmethod
    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        """Everything that this module multiplies on one microbatch."""

    @abstractmethod
    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        """What it keeps for the backward pass, for each update group of a step."""


class AroundConfig(ModuleConfig):
    """The description of a term that makes a module by itself, and beside others is added to the module they make.

    Its loss couples the examples of a step, so that a first pass without a graph runs whatever it multiplies forward.
    """

    @abstractmethod
    def around(self, module: ObjectiveModule, model: ModelConfig) -> ObjectiveModule:
        """What trains this term and those of `module`, whose parameters keep their names."""

    @abstractmethod
    def products_around(self, model: ModelConfig, shape: Shape) -> Iterator[Product]:
        """What it adds to the products of the other terms."""

    @abstractmethod
    def keeps_around(self, model: ModelConfig, shape: Shape, kernel: Kernel) -> Activations:
        """What it adds to what each update group of theirs keeps."""
