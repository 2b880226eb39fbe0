"""Distillation: a student learns its teachers' distributions, the direction of their last states, or layers' states.

`distil` and `cosine` are DistilBERT's losses (Sanh et al. 2019, section 3), `hidden` is TinyBERT's loss on states
(Jiao et al. 2020, section 3.1). TinyBERT's loss on attention scores is omitted, because our kernels do not store
scores, whose number grows with the square of a row's length.

The teachers are frozen networks that read the same rows, with the same masks. They are not submodules of the student's
module (`modules/teacher.py`); `hold_teachers` passes them to the module after it is built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import linear_weight_count
from encoder_core.objectives.mlm import MaskedTokens
from encoder_core.objectives.term import (
    HeadConfig,
    HeadTerm,
    Refusal,
    SharedParts,
    SmallObjective,
    TermSetting,
    TermSums,
)

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from encoder_core.batch import Batch
    from encoder_core.heads.prediction import MaskedLanguageModelHead
    from encoder_core.objectives.modules.states import States
    from encoder_core.objectives.modules.teacher import TeacherOutputs


DistilledTokens = Literal["all", "targets"]


class TeacherSource(BaseModel):
    """A stored teacher, and its shape.

    Attributes:
        uri: a training run, or a folder in transformers' format.
        step: step of the run's checkpoint; None: the newest one when the student's run is created.
        model: the teacher's shape, like a recipe's `model`. Costs are computed from it, and the stored teacher must
            match it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(min_length=1)
    step: int | None = Field(default=None, ge=0)
    model: ModelConfig


class DistilConfig(HeadConfig):
    """Distillation of distributions over the vocabulary: T^2 KL(teachers || student), softened by the temperature T.

    Attributes:
        temperature: T.
        places: the tokens at which the student learns: all tokens (as in the official code), or only mlm's targets.
        layers: the teacher's layers from which the student's layers are initialised, if the run starts from its
            teacher; None: layers spread evenly from the first to the last.
        teachers: the teachers; with several, the student learns the mean of their distributions.
    """

    name = "distil"
    reads = "all"

    temperature: float = Field(default=2.0, gt=0)
    places: DistilledTokens = "all"
    layers: tuple[int, ...] | None = None
    teachers: tuple[TeacherSource, ...] = Field(min_length=1)

    def shrink(self, form: SmallObjective) -> "DistilConfig":
        """Return the term with shrunk teachers."""
        teachers = tuple(source.model_copy(update={"model": form.model(source.model)}) for source in self.teachers)
        return self.model_copy(update={"teachers": teachers, "layers": None})

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without mlm or with a generator, and layers that do not fit the teacher."""
        if "mlm" not in setting.terms:
            yield Refusal(
                ("objective", self.name),
                "distil needs mlm: the student's distribution is that of mlm's head",
                "add objective.mlm, with a small weight if it should count little",
            )
        if "rtd" in setting.terms:
            yield Refusal(
                ("objective", self.name),
                "distil cannot be combined with rtd: the generator would be the student, but it is "
                "discarded after training",
                "remove objective.rtd or objective.distil",
            )
        yield from self._layer_refusals(setting)

    def _layer_refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        own, its = setting.model.distinct_layer_count, self.teachers[0].model.distinct_layer_count
        if self.layers is not None and (len(self.layers) != own or not all(0 <= i < its for i in self.layers)):
            yield Refusal(
                ("objective", self.name, "layers"),
                f"the student's {own} layers cannot be initialised with layers {list(self.layers)} of a teacher with "
                f"{its} layers",
                f"list one of the teacher's layers, 0 to {its - 1}, for each layer of the student",
            )

    def build(self, shared: SharedParts) -> "Distillation":
        return Distillation(self, shared)


class CosineConfig(HeadConfig):
    """Distillation of the last states' direction: the mean over teachers of 1 - cos(teacher, student)."""

    name = "cosine"
    reads = "all"

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without distil, and teachers that do not have the student's width."""
        distil = setting.terms.get(DistilConfig.name)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", self.name),
                "cosine compares the student's states with those of distil's teachers, but there are none",
                "add objective.distil, or remove objective.cosine",
            )
            return
        for number, teacher in enumerate(distil.teachers):
            if teacher.model.hidden != setting.model.hidden:
                yield Refusal(
                    ("objective", self.name),
                    f"teacher {number} has states of width {teacher.model.hidden}, the student {setting.model.hidden}",
                    f"set model.hidden to {teacher.model.hidden}, or remove objective.cosine",
                )

    def build(self, shared: SharedParts) -> "LastStateDistillation":
        return LastStateDistillation(self, {})


class HiddenConfig(HeadConfig):
    """Distillation of hidden states: their mean squared differences, summed over the student's embeddings and layers.

    Attributes:
        layers: for the student's embeddings and each of its layers, in order, the teacher's states that they learn: 0:
            the embeddings, n: the output of the n-th layer. None: spread evenly.
        projection: width of the teacher's states, if it differs from the student's: one learned Linear projects the
            student's states of all layers to this width. It is not exported. None: the widths are equal.
    """

    name = "hidden"
    reads = "layers"

    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    projection: int | None = Field(default=None, gt=0)

    def weight_count(self, model: ModelConfig) -> int:
        return 0 if self.projection is None else linear_weight_count(model.hidden, self.projection)

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse objectives without exactly one teacher, and widths or layers that do not match the teacher's."""
        distil = setting.terms.get(DistilConfig.name)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", self.name),
                "hidden compares the student's layers with those of distil's teacher, but there is none",
                "add objective.distil, or remove objective.hidden",
            )
            return
        if len(distil.teachers) > 1:
            yield Refusal(
                ("objective", self.name),
                f"the student's layers learn from one teacher, but there are {len(distil.teachers)}",
                "keep one teacher, or remove objective.hidden",
            )
        teacher = distil.teachers[0].model
        yield from self._width_refusals(setting.model, teacher)
        yield from self._depth_refusals(setting.model.layers, teacher.layers)

    def _width_refusals(self, student: ModelConfig, teacher: ModelConfig) -> Iterator[Refusal]:
        own, wanted = self.projection or student.hidden, teacher.hidden
        if own != wanted:
            yield Refusal(
                ("objective", self.name, "projection"),
                f"the teacher's states are {wanted} wide, but the student's are {own}",
                f"set objective.hidden.projection to {'null' if student.hidden == wanted else wanted}",
            )

    def _depth_refusals(self, student_layers: int, teacher_layers: int) -> Iterator[Refusal]:
        if self.layers is not None and (
            len(self.layers) != student_layers + 1 or not all(0 <= number <= teacher_layers for number in self.layers)
        ):
            yield Refusal(
                ("objective", self.name, "layers"),
                f"the student's embeddings and {student_layers} layers cannot learn states {[*self.layers]} of a "
                "teacher with "
                f"{teacher_layers} layers",
                f"list states of the teacher, 0 (embeddings) to {teacher_layers}, one for each of the student's "
                f"{student_layers + 1} states",
            )

    def shrink(self, form: SmallObjective) -> "HiddenConfig":
        """Return the term without projection, because all shrunk networks have the same width."""
        return self.model_copy(update={"layers": None, "projection": None})

    def teacher_layers(self, student: int, teacher: int) -> tuple[int, ...]:
        """Return which of the teacher's states (0: embeddings, n: output of layer n) the student's embeddings and each
        of its layers learn. `student`, `teacher`: their numbers of layers.
        """
        if self.layers is not None:
            return self.layers
        return tuple(round(number * teacher / student) for number in range(student + 1))

    def build(self, shared: SharedParts) -> "LayerDistillation":
        return LayerDistillation(self, shared)


class Distillation(HeadTerm):
    """The distillation loss over tokens; metric "correct": tokens where student and teachers predict the same id."""

    _head: "MaskedLanguageModelHead"

    def __init__(self, config: DistilConfig, shared: SharedParts) -> None:
        from encoder_core.objectives.modules.teacher import FrozenNetworks, Teacher

        self._teachers = FrozenNetworks[Teacher]()
        super().__init__(config, {"teachers": self._teachers})
        self._config = config
        self._taught: "WeakKeyDictionary[States, list[TeacherOutputs]]" = WeakKeyDictionary()
        self._layers: tuple[int, ...] = ()

    @property
    def teacher_model(self) -> ModelConfig:
        """Configuration of the first teacher's network."""
        return self._config.teachers[0].model

    def request_layer_states(self, layers: tuple[int, ...]) -> None:
        """Let the teachers also return the states of these layers, which another term needs (`Teacher.forward`)."""
        self._layers = layers

    def connect(self, terms: Mapping[str, HeadTerm]) -> None:
        """Take mlm's head, which gives the student's distribution."""
        masked = terms["mlm"]
        assert isinstance(masked, MaskedTokens)
        self._head = masked.head

    def target_count(self, batch: "Batch") -> int:
        return self._student_batch(batch).target_ids.numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        from encoder_core.heads.distillation import LogitFactors, linear_distillation

        head, student_batch = self._head, self._student_batch(batch)
        own = LogitFactors(head.features(states.states_for(student_batch)), head.decoder.weight, head.decoder.bias)
        scores = [said.scores for said in self.teacher_outputs(states, batch)]
        found = linear_distillation(own, scores, self._config.temperature)
        return TermSums(found.loss_sum, student_batch.target_ids.numel(), {"correct": found.agreeing})

    def teacher_outputs(self, states: "States", batch: "Batch") -> "list[TeacherOutputs]":
        """Return each teacher's outputs for the batch. They are computed once, for all terms."""
        if states not in self._taught:
            assert self._teachers.networks, "hold_teachers must be called before the first batch"
            student_batch = self._student_batch(batch)
            self._taught[states] = [teacher(student_batch, self._layers) for teacher in self._teachers.networks]
        return self._taught[states]

    def _student_batch(self, batch: "Batch") -> "Batch":
        """Return the batch whose targets are the tokens at which the student learns."""
        if self._config.places == "targets":
            return batch
        return _with_all_targets(batch)


def _with_all_targets(batch: "Batch") -> "Batch":
    """Return the batch, and its copy on the host, with every token that may contribute to a loss as a target."""
    import torch

    at_T = batch.select_learnable(torch.arange(len(batch.tokens), device=batch.tokens.device))
    host = None if batch.host is None else _with_all_targets(batch.host)
    return replace(batch, target_positions=at_T, target_ids=batch.select_learnable(batch.tokens), host=host)


class StateDistillation(HeadTerm):
    """Base of losses between the student's states and those of the teachers of `distil`, at all tokens."""

    distillation: Distillation

    def connect(self, terms: Mapping[str, HeadTerm]) -> None:
        """Take the term `distil`, which runs the teachers."""
        distillation = terms[DistilConfig.name]
        assert isinstance(distillation, Distillation)
        self.distillation = distillation

    def target_count(self, batch: "Batch") -> int:
        return batch.loss_token_count


class LastStateDistillation(StateDistillation):
    """The cosine loss of last states, summed over tokens; the mean over teachers."""

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        from encoder_core.heads.distillation import cosine_distances

        teacher_outputs = self.distillation.teacher_outputs(states, batch)
        own = batch.select_learnable(states.all_states)
        distances = [cosine_distances(own, batch.select_learnable(said.last)) for said in teacher_outputs]
        return TermSums(sum(distances[1:], start=distances[0]) / len(distances), batch.loss_token_count)


class LayerDistillation(StateDistillation):
    """The loss on the states of layers, summed over tokens."""

    def __init__(self, config: HiddenConfig, shared: SharedParts) -> None:
        from torch import nn

        wide = config.projection
        projection = None if wide is None else nn.Linear(shared.model.hidden, wide)
        super().__init__(config, {} if projection is None else {"hidden_projection": projection})
        self._config, self._layers, self._projection = config, shared.model.layers, projection

    def connect(self, terms: Mapping[str, HeadTerm]) -> None:
        super().connect(terms)
        self.distillation.request_layer_states(
            self._config.teacher_layers(self._layers, self.distillation.teacher_model.layers)
        )

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        import torch
        import torch.nn.functional as F

        theirs = self.distillation.teacher_outputs(states, batch)[0].layers
        wide = torch.promote_types(theirs[0].dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=batch.tokens.device)
        for own_TH, teacher_TH in zip(
            map(batch.select_learnable, states.layers), map(batch.select_learnable, theirs), strict=True
        ):
            projected_TH = own_TH if self._projection is None else self._projection(own_TH)
            squares = F.mse_loss(projected_TH.to(wide), teacher_TH.to(wide), reduction="sum")
            loss_sum = loss_sum + squares / teacher_TH.shape[1]
        return TermSums(loss_sum, self.target_count(batch))
