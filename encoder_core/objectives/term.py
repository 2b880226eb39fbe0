"""The interface of a loss term: its settings in a recipe (`TermConfig`), and the heads and loss that it builds.

Reading a recipe must not import torch, so a term's file imports torch only where it builds and computes. The package's
README, "Terms", explains how to write a term.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_serializer, model_validator

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from jaxtyping import Int, Num
    from torch import Tensor, nn

    from encoder_core.batch import Batch
    from encoder_core.heads.prediction import MaskedLanguageModelHead
    from encoder_core.objectives.modules.losses import ObjectiveModule
    from encoder_core.objectives.modules.states import States


class WeightSchedule(BaseModel):
    """A term's weight that changes linearly from `start` to `end` in `steps` steps, and then stays constant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: float = Field(ge=0)
    end: float = Field(ge=0)
    steps: PositiveInt

    @model_validator(mode="after")
    def _check_weight_positive(self) -> "WeightSchedule":
        if not self.start and not self.end:
            raise ValueError("the term's weight would be 0 in every step; remove the term")
        return self


Weight = Annotated[float, Field(gt=0)] | WeightSchedule
"""A term's weight. A schedule counts the steps of the run or, if a phase sets it, the steps of the phase."""


def weight_at(weight: Weight, step: int) -> float:
    """Return the weight in step `step`, from 0. A schedule has `start` in step 0, and `end` from step `steps` on."""
    if not isinstance(weight, WeightSchedule):
        return weight
    done = min(step, weight.steps) / weight.steps
    return weight.start + (weight.end - weight.start) * done


def last_weight(weight: Weight) -> float:
    """Return the weight of a term in held-out losses of any step: the constant weight, or a schedule's final weight."""
    return weight.end if isinstance(weight, WeightSchedule) else weight


Label = Literal["next", "order"]
"""The meaning of a row's label. `next`: whether the second segment follows the first. `order`: whether the segments are
in order."""


@dataclass(frozen=True)
class RowFacts:
    """The properties of the input's rows on which terms depend.

    Attributes:
        packing: the recipe's input.packing (how rows are made of texts), for messages.
        label: meaning of each row's label; None: rows have no labels.
        texts: number of whole, unmasked texts in a row (contrastive training); 0: rows are running text.
        repeats: whether these texts are copies of one text.
        lanes: whether each row continues the text of a row of the previous step.
        reuse: number of tokens that a row repeats from the row that it continues.
        unit: unit of masking: token, whole_word, ngram, span.
        packed: whether a row is running text in a single segment.
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
    """The properties of a training phase on which terms depend: number of tokens of its longest row, and number of
    rows of a step (None if the batch size is given in tokens).
    """

    length: int
    rows: int | None


@dataclass(frozen=True)
class TermSetting:
    """The model, objective and input with which a term is to be trained.

    Attributes:
        model: configuration of the network that is used after pretraining.
        terms: all terms of the objective, by name.
        rows: properties of the rows; None if unknown.
        phases: properties of the run's phases; empty if unknown.
    """

    model: ModelConfig
    terms: Mapping[str, "TermConfig"]
    rows: RowFacts | None = None
    phases: tuple[PhaseFacts, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """The reason why a term cannot be trained, and a remedy. `path`: the recipe's key to change."""

    path: tuple[str | int, ...]
    what: str
    remedy: str


def family_refusal(name: str, setting: TermSetting, why: str, remedy: str) -> Refusal:
    """Return the `Refusal` for a model family that the term `name` cannot train. `why`: the reason, as a clause."""
    what = f"a model of family {setting.model.family} is not trained by {name}: {why}"
    return Refusal(("objective",), what, remedy)


def refuse_decoder_family(name: str, setting: TermSetting) -> Iterator[Refusal]:
    """Refuse encoder-decoder families for the term `name`, which trains only an encoder."""
    if setting.model.has_decoder:
        remedy = f"use denoise for {setting.model.family}, and {name} for another family"
        yield family_refusal(name, setting, "its decoder would learn nothing", remedy)


def require_mlm(name: str, setting: TermSetting, why: str) -> Iterator[Refusal]:
    """Refuse an objective without mlm, which the term `name` needs. `why`: the reason, as a clause."""
    if "mlm" not in setting.terms:
        others = [other for other in setting.terms if other != name]
        other_objective = f", not {others[0]}" if others else ""
        yield Refusal(
            ("objective",),
            f"{name} needs mlm{other_objective}: {why}",
            f"add objective.mlm, or remove objective.{name}",
        )


@dataclass(frozen=True)
class SmallObjective:
    """The sizes to which `--tiny` shrinks a recipe's terms, together with its model.

    Attributes:
        length: number of tokens in the longest row.
        hidden: width of the small model.
        model: function that shrinks another model, such as a teacher.
    """

    length: int
    hidden: int
    model: Callable[[ModelConfig], ModelConfig]


class TermConfig(BaseModel, ABC):
    """The settings of a term in a recipe. Subclasses are frozen, and refuse unknown keys.

    Attributes:
        name: the term's key in a recipe, and prefix of its metrics.
        exported: the head that it trains, if transformers has a class for it; None: there is no such head.
        weight: factor of the term's mean loss in the total loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    exported: ClassVar[Heads | None] = None

    weight: Weight = 1.0

    @abstractmethod
    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Yield every reason why this term cannot be trained in `setting`."""

    def shrink(self, form: SmallObjective) -> "TermConfig":
        """Return this term for a small model and short rows (`--tiny`). Settings that do not depend on sizes stay."""
        return self


class OmittedWeightTerm(TermConfig):
    """A term whose early version had no weight. A weight of 1 is left out of stored recipes, so that they, their
    fingerprints and the keys of evaluations are as before.

    Attributes:
        unwritten: the fields that old recipes lack, with the values that they then have.
    """

    unwritten: ClassVar[Mapping[str, object]] = {"weight": 1.0}

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if (name, value) not in self.unwritten.items()}


StatesRead = Literal["targets", "first", "all", "layers"]
"""The hidden states that a term reads: the last layer's at targets, at rows' first tokens, or at all tokens; or all
layers'."""


@dataclass(frozen=True)
class SharedParts:
    """The modules that all terms of a network share, on the default device, with weights not yet initialised.

    Attributes:
        model: configuration of the network.
        word: the network's word embeddings.
        head: function that returns the shared head that predicts token ids, always the same object.
    """

    model: ModelConfig
    word: "nn.Embedding"
    head: "Callable[[], MaskedLanguageModelHead]"


class HeadConfig(TermConfig):
    """The settings of a term that adds heads and a loss to a network whose encoder other terms may share.

    Attributes:
        reads: the states that the term reads; they decide for how many tokens DeBERTa's last layer runs.
        causal: whether the term is trained only on causal rows, on which no other term is trained.
        predicts_ids: whether the term uses the head that predicts token ids, which all such terms share.
    """

    reads: ClassVar[StatesRead]
    causal: ClassVar[bool] = False
    predicts_ids: ClassVar[bool] = False

    @abstractmethod
    def build(self, shared: SharedParts) -> "HeadTerm":
        """Build the heads and the loss on the default device. Weights are not yet initialised."""

    def weight_count(self, model: ModelConfig) -> int:
        """Return the number of parameters that the term adds to `model`, without those that other terms share."""
        return 0


@dataclass(frozen=True)
class TermSums:
    """The sums of a term on one microbatch.

    Attributes:
        loss_sum: scalar, fp32 or wider, summed over targets.
        targets: number of summands of `loss_sum`; equals `HeadTerm.target_count` of the batch.
        metrics: sums by name, such as "correct", scalars without gradient; see `figures.py`.
        drawn: an id sampled for each target, from the masked-token term if `States.temperature` is set; else None.
    """

    loss_sum: 'Num[Tensor, ""]'
    targets: int
    metrics: 'Mapping[str, Num[Tensor, ""]]' = field(default_factory=dict)
    drawn: 'Int[Tensor, " targets"] | None' = None


class HeadTerm(ABC):
    """The heads and the loss of a term, on a network whose encoder other terms may share.

    It is not a module: the network owns `heads`, under the names that their parameters have in checkpoints. A head
    without targets runs on 0 rows, so that every parameter takes part in the backward pass on every rank. A head may
    be a frozen network (`requires_grad_(False)`, and a `train` that keeps it in evaluation mode), for which the engine
    keeps neither master weights nor moments.

    Attributes:
        name: name of the term; key of `target_counts`, and prefix of metrics.
        weight: the term's constant weight, or a schedule's final weight; the trainer knows each step's weight.
        reads: the states that the term reads.
        causal: whether the term has targets only in causal rows; otherwise it has targets only in other rows.
        heads: modules that are trained with the term, by name.
    """

    def __init__(self, config: HeadConfig, heads: "Mapping[str, nn.Module]") -> None:
        self.name = config.name
        self.weight = last_weight(config.weight)
        self.reads = config.reads
        self.causal = config.causal
        self.heads = heads

    def connect(self, terms: Mapping[str, "HeadTerm"]) -> None:
        """Receive all terms of the network, including itself, by name, before the first batch.

        A term that uses another term's head or result overrides this.
        """
        return

    @abstractmethod
    def target_count(self, batch: "Batch") -> int:
        """Return the number of the term's targets in this batch, by which its loss sum will be divided."""

    @abstractmethod
    def sums(self, states: "States", batch: "Batch") -> TermSums:
        """Compute the term's loss and metrics from the network's states of the batch."""


class ModuleConfig(TermConfig):
    """The settings of a term that builds the whole module, because it has a second network, XLNet's two streams, or a
    coupled loss (which depends on all examples of a step). An objective has at most one such term.
    """

    @abstractmethod
    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> "ObjectiveModule":
        """Build the module that trains this term and `heads`, on the default device, without initialising weights.

        Raises:
            ModelError: the size of the vocabulary is unknown.
        """

    def weight_count(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> int:
        """Return the number of parameters of the module that `build` returns. Tied parameters count once."""
        return model.encoder_weight_count() + model.decoder_weight_count()


class BottleneckConfig(HeadConfig):
    """A term, trained together with mlm, that predicts tokens from the state of the row's first token, so that this
    state learns to represent the row's text. Its layers are not exported.
    """

    predicts_ids = True

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm, or with a generator."""
        yield from require_mlm(self.name, setting, "the encoder reads the text that mlm has masked")
        if "rtd" in setting.terms:
            yield Refusal(
                ("objective", self.name),
                f"{self.name} cannot be combined with rtd: it would train the vectors of the generator, which is "
                "discarded after training",
                f"remove objective.rtd or objective.{self.name}",
            )
