"""The contract of a term of the loss, and the states of one network that several terms read.

A term has two sides in one file of this folder. Its description (`TermConfig`) is what a recipe says, with what the
term cannot be combined, and what it costs. It builds the device half: heads on the states of a network that terms
share (`HeadTerm`), or a whole module (`ModuleConfig`). The package's README, "Terms", explains how to write one.
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

    DeBERTa's last layer runs for all tokens only if a term needs that, or if several read its output. Otherwise it
    runs for the requested tokens.

    Attributes:
        layered: whether a term reads the states of all layers, which are then stored.
        temperature: temperature at which an id is drawn for every target; None: none are drawn.
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
        """Return the last layer's output at sorted flat positions. `most`: largest number of them in a row, if they
        are not the targets.
        """
        if self._whole or not isinstance(self._encoder, DisentangledEncoder):
            return self.everywhere.index_select(0, at_N)
        if self._decoder is None:
            return self._encoder.at(at_N, self._batch, most)
        before_TH = self._before_last
        queries_NH = before_TH.index_select(0, at_N)
        return self._encoder.look_again(queries_NH, at_N, before_TH, self._batch, most=most)

    @cached_property
    def at_targets(self) -> Float[Tensor, "targets hidden"]:
        """The states from which hidden tokens are predicted: the last layer's output at the targets, or the mask
        decoder's.
        """
        return self.predicting(self._batch)

    def predicting(self, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """Return the same for the targets of `batch`, which has the rows of this batch."""
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
"""The meaning of a row's label: whether its second segment follows the first, or whether the two are in order."""


@dataclass(frozen=True)
class RowFacts:
    """The properties of rows that matter to terms.

    Attributes:
        packing: name of the packing, for messages.
        label: meaning of each row's label; None for rows without labels.
        texts: number of whole texts in a row, in which nothing is masked; 0 for rows of running text.
        repeats: whether these texts are the same text.
        lanes: whether a row continues where its lane's row of the previous step ended.
        reuse: number of tokens that a row repeats from the previous one.
        unit: unit of masking: token, whole_word, ngram, span.
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
    """The properties of a phase that matter to terms: tokens of its longest row, and rows of a step (None if it
    counts tokens).
    """

    length: int
    rows: int | None


@dataclass(frozen=True)
class Setting:
    """The surroundings of a term.

    Attributes:
        model: configuration of the network that is used after pretraining.
        terms: all terms of the objective, by name.
        rows: properties of the rows; None if unknown.
        phases: phases of the run; empty if unknown.
    """

    model: ModelConfig
    terms: Mapping[str, "TermConfig"]
    rows: RowFacts | None = None
    phases: tuple[PhaseFacts, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a term cannot be trained here. `path`: the place in the recipe to change."""

    path: tuple[str | int, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class SmallObjective:
    """The size to which a recipe's terms are shrunk, together with its model.

    Attributes:
        length: number of tokens in the longest row.
        hidden: width of the small model.
        model: function to the small form of another model, such as a teacher.
    """

    length: int
    hidden: int
    model: Callable[[ModelConfig], ModelConfig]


class TermConfig(BaseModel, ABC):
    """A term as a recipe describes it. Subclasses are frozen, and refuse unknown keys.

    Attributes:
        name: the term's key in a recipe and in metrics.
        exported: the heads that it trains, among those for which transformers has classes; None: other heads or none.
        weight: factor of the term's mean loss in the whole loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    exported: ClassVar[Heads | None] = None

    weight: Weight = 1.0

    @abstractmethod
    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Yield every reason why this term cannot be trained in `setting`."""

    def small(self, form: SmallObjective) -> "TermConfig":
        """Return this term for a small model and short rows. Only settings that depend on their size change."""
        return self

    def scored(self, shape: Shape) -> int:
        """Return the number of tokens in a microbatch for which the vocabulary's logits are computed."""
        return 0


class LateWeight(TermConfig):
    """A term whose first version had no weight. A weight of 1 is not written, so that recipes, fingerprints and the
    keys of evaluations stay the same.
    """

    @model_serializer(mode="wrap")
    def _unspoken(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "weight" or value != 1.0}


@dataclass(frozen=True)
class TermSums:
    """A term on one microbatch.

    Attributes:
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands; equals `HeadTerm.targets` of the batch.
        metrics: sums by name ("correct"), scalars without gradient; `encoder_core/train/metrics.py` makes figures of
            them.
        drawn: an id for each target, if `States.temperature` asks the masked-token term for them.
    """

    loss_sum: Num[Tensor, ""]
    targets: int
    metrics: Mapping[str, Num[Tensor, ""]] = field(default_factory=dict)
    drawn: Int[Tensor, " targets"] | None = None


Reads = Literal["targets", "first", "all", "layers"]
"""The states that a term reads: those of targets, of rows' first tokens, or of all tokens; or those of all layers."""


class HeadTerm(ABC):
    """The device half of a term that shares one network's encoder with others.

    It is not a module: the network owns `heads`, under the names of their parameters in checkpoints. A head without
    targets still runs, on no rows, so that every parameter takes part in the backward pass on every rank. A head may
    be a frozen network of the term (`requires_grad_(False)`, and a `train` that keeps it in evaluation mode). The
    engine then gives it neither master weights nor moments.

    Attributes:
        name: name of the term; key of `target_counts` and of metrics.
        weight: weight of the term; a schedule's final weight, while the trainer has the weight of each step.
        reads: the states that it reads.
        heads: modules that are trained with the term, by name.
    """

    def __init__(self, config: "HeadConfig", heads: Mapping[str, nn.Module]) -> None:
        self.name = config.name
        self.weight = last_weight(config.weight)
        self.reads = config.reads
        self.heads = heads

    def meet(self, others: Mapping[str, "HeadTerm"]) -> None:
        """Receive all terms that share the network, including itself, by name, before the first batch.

        This is for a term that uses another's head or result; most terms ignore it.
        """
        return

    @abstractmethod
    def targets(self, batch: Batch) -> int:
        """Return how many summands the term has for this batch; known before the forward pass."""

    @abstractmethod
    def sums(self, states: States, batch: Batch) -> TermSums:
        """Compute the term on the network's states of the batch."""


class HeadConfig(TermConfig):
    """The description of a term that shares one network's encoder with others.

    Attributes:
        reads: the states that the term reads, which decides for how many tokens DeBERTa's last layer runs.
    """

    reads: ClassVar[Reads]

    @abstractmethod
    def device(self, model: ModelConfig, word: nn.Embedding) -> HeadTerm:
        """Build the device half on a network of `model` with the word embeddings `word`.

        Its heads are on the default device, weights not yet initialised.
        """

    @abstractmethod
    def products(self, states: CountedStates) -> Iterator[Product]:
        """Yield the products of this term on one microbatch, besides the encoder's: of the states that it needs, and
        of its heads.
        """

    @abstractmethod
    def keeps(self, states: CountedStates) -> Activations:
        """Return what the same saves for the backward pass."""


class ModuleConfig(TermConfig):
    """The description of a term that builds the whole module: a second network, another encoder's streams, or a
    coupled loss.

    A coupled loss depends on all examples of a step. An objective has at most one such term.
    """

    @abstractmethod
    def module(
        self,
        model: ModelConfig,
        heads: Sequence[HeadConfig],
        *,
        checkpoint_activations: bool = False,
        attend: Attend = automatic,
    ) -> ObjectiveModule:
        """Build the module that trains this term and `heads`, on the default device; weights not yet initialised."""

    @abstractmethod
    def products(self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape) -> Iterator[Product]:
        """Yield all products of this module on one microbatch."""

    @abstractmethod
    def keeps(
        self, model: ModelConfig, heads: Sequence[HeadConfig], shape: Shape, kernel: Kernel
    ) -> list[Activations]:
        """Return what this module saves for the backward pass, for each update group of a step."""


class AroundConfig(ModuleConfig):
    """The description of a term that builds a module by itself, and that can be added to the module of other terms.

    Its loss couples the examples of a step, so a first pass without a graph runs its forward products once more.
    """

    @abstractmethod
    def around(self, module: ObjectiveModule, model: ModelConfig) -> ObjectiveModule:
        """Return the module that trains this term and those of `module`, whose parameters keep their names."""

    @abstractmethod
    def products_around(self, model: ModelConfig, shape: Shape) -> Iterator[Product]:
        """Yield the products that it adds to those of the other terms."""

    @abstractmethod
    def keeps_around(self, model: ModelConfig, shape: Shape, kernel: Kernel) -> Activations:
        """Return what it adds to what each update group of the other terms saves."""
