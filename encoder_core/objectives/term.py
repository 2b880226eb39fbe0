"""The contract of a term of the loss: its description, of which a recipe is made, and what a description builds.

Reading a recipe needs no torch: a term's file imports it where it builds and computes. The package's README, "Terms",
explains how to write a term.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_serializer, model_validator

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads

if TYPE_CHECKING:  # torch is imported only where modules are built: reading a recipe needs none
    from jaxtyping import Int, Num
    from torch import Tensor, nn

    from encoder_core.batch import Batch
    from encoder_core.heads.prediction import MaskedLanguageModelHead
    from encoder_core.objectives.modules.losses import ObjectiveModule
    from encoder_core.objectives.modules.states import States


class WeightSchedule(BaseModel):
    """A weight that changes linearly from `start` to `end` in `steps` steps, and then stays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: float = Field(ge=0)
    end: float = Field(ge=0)
    steps: PositiveInt

    @model_validator(mode="after")
    def _check_weight_positive(self) -> "WeightSchedule":
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
        packed: whether a row is text of one segment.
    """

    packing: str
    label: Label | None = None
    texts: int = 0
    repeats: bool = False
    lanes: bool = False
    reuse: int = 0
    unit: str = "token"
    packed: bool = True


@dataclass(frozen=True)
class PhaseFacts:
    """The properties of a phase that matter to terms: tokens of its longest row, and rows of a step (None if it
    counts tokens).
    """

    length: int
    rows: int | None


@dataclass(frozen=True)
class TermSetting:
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


def family_refusal(name: str, setting: TermSetting, why: str, remedy: str) -> Refusal:
    """Return the refusal of the model's family by the term `name`. `why`: the reason, as a clause."""
    what = f"a model of family {setting.model.family} is not trained by {name}: {why}"
    return Refusal(("objective",), what, remedy)


def refuse_decoder_family(name: str, setting: TermSetting) -> Iterator[Refusal]:
    """Refuse a family with a decoder for the term `name`, which trains an encoder alone."""
    if setting.model.has_decoder:
        remedy = f"use denoise for {setting.model.family}, and {name} for another family"
        yield family_refusal(name, setting, "its decoder would learn nothing", remedy)


def require_mlm(name: str, setting: TermSetting, why: str) -> Iterator[Refusal]:
    """Refuse an objective without mlm for the term `name`, which needs it. `why`: the reason, as a clause."""
    if "mlm" not in setting.terms:
        others = [other for other in setting.terms if other != name]
        other_objective = f", not {others[0]}" if others else ""
        yield Refusal(
            ("objective",),
            f"{name} needs mlm{other_objective}: {why}",
            f"add objective.mlm, or leave {name} out",
        )


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
    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Yield every reason why this term cannot be trained in `setting`."""

    def shrink(self, form: SmallObjective) -> "TermConfig":
        """Return this term for a small model and short rows. Only settings that depend on their size change."""
        return self


class OmittedWeightTerm(TermConfig):
    """A term whose first version had no weight. A weight of 1 is not written, so that recipes, fingerprints and the
    keys of evaluations stay the same.

    Attributes:
        unwritten: the fields that older recipes do not have, and the values that hold without them.
    """

    unwritten: ClassVar[Mapping[str, object]] = {"weight": 1.0}

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if (name, value) not in self.unwritten.items()}


StatesRead = Literal["targets", "first", "all", "layers"]
"""The states that a term reads: those of targets, of rows' first tokens, or of all tokens; or those of all layers."""


@dataclass(frozen=True)
class SharedParts:
    """What terms share, on the default device, its weights not yet initialised.

    Attributes:
        model: configuration of the network.
        word: its word embeddings.
        head: function that returns the head of token ids, the same at every call.
    """

    model: ModelConfig
    word: "nn.Embedding"
    head: "Callable[[], MaskedLanguageModelHead]"


class HeadConfig(TermConfig):
    """The description of a term that shares one network's encoder with others.

    Attributes:
        reads: the states that the term reads, which decides for how many tokens DeBERTa's last layer runs.
        causal: whether it is trained on causal rows; then no other term is, nor it on other rows.
        predicts_ids: whether it has the head of token ids, which all such terms share.
    """

    reads: ClassVar[StatesRead]
    causal: ClassVar[bool] = False
    predicts_ids: ClassVar[bool] = False

    @abstractmethod
    def build(self, shared: SharedParts) -> "HeadTerm":
        """Build the heads and the loss on the default device; weights not yet initialised."""

    def weight_count(self, model: ModelConfig) -> int:
        """Return the number of parameters that the term adds to a network of `model` and shares with no other term."""
        return 0


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

    loss_sum: 'Num[Tensor, ""]'
    targets: int
    metrics: 'Mapping[str, Num[Tensor, ""]]' = field(default_factory=dict)
    drawn: 'Int[Tensor, " targets"] | None' = None


class HeadTerm(ABC):
    """The heads and the loss of a term that shares one network's encoder with others.

    It is not a module: the network owns `heads`, under the names of their parameters in checkpoints. A head without
    targets still runs, on no rows, so that every parameter takes part in the backward pass on every rank. A head may
    be a frozen network of the term (`requires_grad_(False)`, and a `train` that keeps it in evaluation mode). The
    engine then gives it neither master weights nor moments.

    Attributes:
        name: name of the term; key of `target_counts` and of metrics.
        weight: weight of the term; a schedule's final weight, while the trainer has the weight of each step.
        reads: the states that it reads.
        causal: whether it has targets in causal rows, and none in others.
        heads: modules that are trained with the term, by name.
    """

    def __init__(self, config: HeadConfig, heads: "Mapping[str, nn.Module]") -> None:
        self.name = config.name
        self.weight = last_weight(config.weight)
        self.reads = config.reads
        self.causal = config.causal
        self.heads = heads

    def connect(self, terms: Mapping[str, "HeadTerm"]) -> None:
        """Receive all terms that share the network, including itself, by name, before the first batch.

        This is for a term that uses another's head or result; most terms ignore it.
        """
        return

    @abstractmethod
    def target_count(self, batch: "Batch") -> int:
        """Return how many summands the term has for this batch; known before the forward pass."""

    @abstractmethod
    def sums(self, states: "States", batch: "Batch") -> TermSums:
        """Compute the term on the network's states of the batch."""


class ModuleConfig(TermConfig):
    """The description of a term that builds the whole module: a second network, another encoder's streams, or a
    coupled loss.

    A coupled loss depends on all examples of a step. An objective has at most one such term.
    """

    @abstractmethod
    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> "ObjectiveModule":
        """Build the module that trains this term and `heads`, on the default device; weights not yet initialised.

        Raises:
            ModelError: the size of the vocabulary is unknown.
        """

    def weight_count(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> int:
        """Return the number of parameters of that module. Tied parameters count once."""
        return model.encoder_weight_count() + model.decoder_weight_count()


class BottleneckConfig(HeadConfig):
    """A term that predicts tokens through the vector of the row's first token, beside mlm, so that it holds the row's
    text. Its layers are not exported.
    """

    predicts_ids = True

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, or with a generator."""
        yield from require_mlm(self.name, setting, "the vector is made of a text that mlm hides a part of")
        if "rtd" in setting.terms:
            yield Refusal(
                ("objective", self.name),
                f"{self.name} cannot be combined with rtd: it would train the vectors of the generator, which is "
                "discarded after training",
                f"leave rtd or {self.name} out",
            )
