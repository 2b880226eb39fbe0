"""Distillation: a student learns its teachers' distributions, the direction of their last states, and chosen layers.

`distil` and `cosine` are DistilBERT's losses (Sanh et al. 2019, section 3), `hidden` is TinyBERT's loss on states
(Jiao et al. 2020, section 3.1). TinyBERT's loss on attention scores is left out: our kernels store no scores, and
storing them would take the square of every row's length, for student and teacher.

The teachers are frozen networks that read the same rows, masks included. They are not part of the module
(`teacher.py`); `hold_teachers` passes them to it after it is built.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations, kept_by_head
from encoder_core.cost.flops import head
from encoder_core.cost.products import Product, Shape, times, without_gradient
from encoder_core.cost.saved import FP32, Saved
from encoder_core.cost.states import NOTHING, CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.distillation import Scores, cosine_distances, linear_distillation
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.objectives.mlm import MaskedTokens
from encoder_core.objectives.teacher import FrozenNetworks, Teacher, TeacherOutputs
from encoder_core.objectives.term import (
    HeadConfig,
    HeadTerm,
    Refusal,
    Setting,
    SmallObjective,
    States,
    TermSums,
)

Places = Literal["all", "targets"]


class TeacherSource(BaseModel):
    """Where a teacher is stored, and its shape.

    Attributes:
        uri: a run, or a folder in the transformers format.
        step: step of the run's commit; None: the newest when the student's run is created.
        model: the teacher's shape, like a recipe's `model`: costs are counted by it, and the stored teacher must
            match it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(min_length=1)
    step: int | None = Field(default=None, ge=0)
    model: ModelConfig


class DistilConfig(HeadConfig):
    """The teachers' distribution over the vocabulary: T^2 KL(teachers || student), both softened by T.

    Attributes:
        temperature: T.
        places: the tokens where the student learns: all (the official code), or only the targets of mlm.
        layers: the teacher's layers with which the student's are initialised, if the run starts from its teacher;
            None: evenly from the first to the last.
        teachers: the teachers; with several, the student learns the mean of their distributions.
    """

    name = "distil"
    reads = "all"

    temperature: float = Field(default=2.0, gt=0)
    places: Places = "all"
    layers: tuple[int, ...] | None = None
    teachers: tuple[TeacherSource, ...] = Field(min_length=1)

    def device(self, model: ModelConfig, word: nn.Embedding) -> "Distillation":
        return Distillation(self)

    def products(self, states: CountedStates) -> Iterator[Product]:
        """Yield the products of the student's head at the places where it learns, and of the teachers, which have no
        backward pass.
        """
        model, shape = states.model, states.shape
        per_row = self._per_row(shape)
        yield from states.at_targets(per_row)
        yield from head(model, shape.rows * per_row)
        for teacher in self.teachers:
            known = teacher.model.model_copy(update={"vocab": model.vocabulary})
            asked = CountedStates(known, shape, whole=True)
            its = chain(asked.encoder(), asked.at_targets(per_row), head(known, shape.rows * per_row))
            for product in without_gradient(its):
                yield replace(product, layer=False)  # nor is it computed again

    def keeps(self, states: CountedStates) -> Activations:
        """Return what the student's head (and DeBERTa's mask decoder) saves, and the teachers' outputs."""
        shape, per_row = states.shape, self._per_row(states.shape)
        teachers = (Saved("teacher's states", shape.tokens * source.model.hidden) for source in self.teachers)
        outside = (*kept_by_head(states.model, shape.rows * per_row, "places"), *teachers)
        return Activations(outside, ()) + states.at_targets_keeps(per_row)

    def small(self, form: SmallObjective) -> "DistilConfig":
        """Return the term with the small forms of the teachers."""
        teachers = tuple(
            source.model_copy(update={"model": form.model(source.model)}) for source in self.teachers
        )
        return self.model_copy(update={"teachers": teachers, "layers": None})

    def scored(self, shape: Shape) -> int:
        return shape.rows * self._per_row(shape)

    def _per_row(self, shape: Shape) -> int:
        """Return the number of places in a row where the student learns."""
        return shape.length if self.places == "all" else shape.targets_per_row

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without the head of mlm, or with a generator."""
        if "mlm" not in setting.terms:
            yield Refusal(
                ("objective", self.name),
                "distil needs mlm: the student's distribution is that of mlm's head",
                "add objective.mlm, with a small weight if it shall count little",
            )
        if "rtd" in setting.terms:
            yield Refusal(
                ("objective", self.name),
                "distil cannot be combined with rtd: the generator would be the student, but it is "
                "discarded after training",
                "leave rtd or distil out",
            )
        yield from self._of_layers(setting)

    def _of_layers(self, setting: Setting) -> Iterator[Refusal]:
        own, its = setting.model.distinct_layers, self.teachers[0].model.distinct_layers
        if self.layers is not None and (
            len(self.layers) != own or not all(0 <= i < its for i in self.layers)
        ):
            yield Refusal(
                ("objective", self.name, "layers"),
                f"the student's {own} layers cannot be initialised with layers {list(self.layers)} of {its}",
                f"name one of the teacher's layers, 0 to {its - 1}, for each of the student's",
            )


class CosineConfig(HeadConfig):
    """The direction of the teachers' last states: the mean over teachers of 1 - cos(teacher, student)."""

    name = "cosine"
    reads = "all"

    def device(self, model: ModelConfig, word: nn.Embedding) -> "StatesAlike":
        return StatesAlike(self)

    def products(self, states: CountedStates) -> Iterator[Product]:
        return iter(())

    def keeps(self, states: CountedStates) -> Activations:
        return NOTHING

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without teachers of the student's width."""
        distil = setting.terms.get(DistilConfig.name)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", self.name),
                "cosine compares the student's states with those of distil's teachers, but there are none",
                "add objective.distil, or leave cosine out",
            )
            return
        for number, teacher in enumerate(distil.teachers):
            if teacher.model.hidden != setting.model.hidden:
                yield Refusal(
                    ("objective", self.name),
                    f"teacher {number} has states of width {teacher.model.hidden}, the student {setting.model.hidden}",
                    f"set model.hidden to {teacher.model.hidden}, or leave cosine out",
                )


class Teachers(FrozenNetworks):
    """The teachers of a module that distils; none at first."""

    @property
    def teachers(self) -> list[Teacher]:
        return [network for network in self.networks if isinstance(network, Teacher)]


def hold_teachers(module: nn.Module, teachers: Sequence[Teacher]) -> None:
    """Let `module` learn from these teachers from now on. A module that does not distil is unchanged."""
    for part in module.modules():
        if isinstance(part, Teachers):
            part.hold(teachers)


class Distillation(HeadTerm):
    """Sums of the distillation loss over places; metric "correct": the student's first choice is its teachers'."""

    def __init__(self, config: DistilConfig) -> None:
        self._teachers = Teachers()
        super().__init__(config, {"teachers": self._teachers})
        self._config = config
        self._head: MaskedLanguageModelHead | None = None
        self._taught: WeakKeyDictionary[States, list[TeacherOutputs]] = WeakKeyDictionary()
        self._layers: tuple[int, ...] = ()

    @property
    def teacher(self) -> ModelConfig:
        """The shape of the first teacher."""
        return self._config.teachers[0].model

    def keep(self, layers: tuple[int, ...]) -> None:
        """Let the teachers also return the states of these layers, for another term (`Teacher.say`)."""
        self._layers = layers

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        masked = others["mlm"]
        assert isinstance(masked, MaskedTokens)
        self._head = masked.head

    def targets(self, batch: Batch) -> int:
        return self._asked(batch).target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._head is not None, "the module has introduced its terms to each other"
        head, asked = self._head, self._asked(batch)
        own = Scores(head.features(states.predicting(asked)), head.decoder.weight, head.decoder.bias)
        scores = [said.scores for said in self.taught(states, batch)]
        found = linear_distillation(own, scores, self._config.temperature)
        return TermSums(found.loss_sum, asked.target_ids.numel(), {"correct": found.agreeing})

    def taught(self, states: States, batch: Batch) -> list[TeacherOutputs]:
        """Return what each teacher returns, computed once for all terms of a batch."""
        if states not in self._taught:
            assert self._teachers.networks, "a module that distils has been given its teachers"
            asked = self._asked(batch)
            self._taught[states] = [teacher.say(asked, self._layers) for teacher in self._teachers.teachers]
        return self._taught[states]

    def _asked(self, batch: Batch) -> Batch:
        """Return the batch whose targets are the places where the student learns."""
        if self._config.places == "targets":
            return batch
        return _everywhere(batch)


def _everywhere(batch: Batch) -> Batch:
    """Return the batch with every token as a target at which something may be learned, also in its copy on the host."""
    at_T = batch.of_kept(torch.arange(len(batch.tokens), device=batch.tokens.device))
    host = None if batch.host is None else _everywhere(batch.host)
    return replace(batch, target_positions=at_T, target_ids=batch.of_kept(batch.tokens), host=host)


class StatesAlike(HeadTerm):
    """Sums of the cosine loss over all tokens, as the mean over teachers."""

    def __init__(self, config: CosineConfig) -> None:
        super().__init__(config, {})
        self._distillation: Distillation | None = None

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DistilConfig.name]
        assert isinstance(distillation, Distillation)
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.learned

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        taught = self._distillation.taught(states, batch)
        own = batch.of_kept(states.everywhere)
        distances = [cosine_distances(own, batch.of_kept(said.last)) for said in taught]
        return TermSums(sum(distances[1:], start=distances[0]) / len(distances), batch.learned)


class HiddenConfig(HeadConfig):
    """Mean squared differences of states, summed over the student's embeddings and layers.

    Attributes:
        layers: for the student's embeddings and each of its layers, in order, the number of the teacher's states that
            they learn: 0 the embeddings, n the output of its n-th layer. None: evenly.
        projection: width of the teacher's states, if the student's differ: one learned Linear projects the states of
            all layers to it. It is not exported. None: the widths are equal.
    """

    name = "hidden"
    reads = "layers"

    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    projection: int | None = Field(default=None, gt=0)

    def device(self, model: ModelConfig, word: nn.Embedding) -> "LayersAlike":
        wide = self.projection
        return LayersAlike(self, model.layers, None if wide is None else nn.Linear(model.hidden, wide))

    def products(self, states: CountedStates) -> Iterator[Product]:
        model = states.model
        if self.projection is not None:
            tokens = states.shape.tokens
            once = Product("head: hidden states projected", tokens, model.hidden, self.projection)
            yield from times(iter([once]), model.layers + 1)

    def keeps(self, states: CountedStates) -> Activations:
        """Return the inputs of the squared differences, in fp32, for all states."""
        width = states.shape.tokens * (self.projection or states.model.hidden)
        layers = states.model.layers
        theirs = Saved("teacher's layers", width, FP32, layers)  # of the last one distil keeps the states
        if self.projection is None:
            return Activations((theirs,), ())
        return Activations((theirs, Saved("student's layers, projected", width, FP32, layers + 1)), ())

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse objectives without exactly one teacher, and widths or layers that do not match it."""
        distil = setting.terms.get(DistilConfig.name)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", self.name),
                "hidden compares the student's layers with those of distil's teacher, but there is none",
                "add objective.distil, or leave hidden out",
            )
            return
        if len(distil.teachers) > 1:
            yield Refusal(
                ("objective", self.name),
                f"the student's layers learn from one teacher, but there are {len(distil.teachers)}",
                "keep one teacher, or leave hidden out",
            )
        teacher = distil.teachers[0].model
        yield from self._widths(setting.model, teacher)
        yield from self._depths(setting.model.layers, teacher.layers)

    def _widths(self, student: ModelConfig, teacher: ModelConfig) -> Iterator[Refusal]:
        own, wanted = self.projection or student.hidden, teacher.hidden
        if own != wanted:
            yield Refusal(
                ("objective", self.name, "projection"),
                f"the teacher's states are {wanted} wide, but the student's are {own}",
                f"set objective.hidden.projection to {'null' if student.hidden == wanted else wanted}",
            )

    def _depths(self, student: int, teacher: int) -> Iterator[Refusal]:
        if self.layers is not None and (
            len(self.layers) != student + 1 or not all(0 <= number <= teacher for number in self.layers)
        ):
            yield Refusal(
                ("objective", self.name, "layers"),
                f"the student's embeddings and {student} layers cannot learn states {[*self.layers]} of a teacher with "
                f"{teacher} layers",
                f"name a state of the teacher, 0 (embeddings) to {teacher}, for each of the student's {student + 1}",
            )

    def small(self, form: SmallObjective) -> "HiddenConfig":
        """Return the term without projection, because all small networks have the same width."""
        return self.model_copy(update={"layers": None, "projection": None})

    def teacher_layers(self, student: int, teacher: int) -> tuple[int, ...]:
        """Return the numbers of the teacher's states in the order of the student's; `student` and `teacher` are
        numbers of layers.
        """
        if self.layers is not None:
            return self.layers
        return tuple(round(number * teacher / student) for number in range(student + 1))


class LayersAlike(HeadTerm):
    """Sums of the loss on layers over all tokens."""

    def __init__(self, config: HiddenConfig, layers: int, projection: nn.Linear | None) -> None:
        super().__init__(config, {} if projection is None else {"hidden_projection": projection})
        self._config, self._layers, self._projection = config, layers, projection
        self._distillation: Distillation | None = None

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DistilConfig.name]
        assert isinstance(distillation, Distillation)
        distillation.keep(self._config.teacher_layers(self._layers, distillation.teacher.layers))
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.learned

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        theirs = self._distillation.taught(states, batch)[0].layers
        wide = torch.promote_types(theirs[0].dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=batch.tokens.device)
        for own_TH, teacher_TH in zip(
            map(batch.of_kept, states.layers), map(batch.of_kept, theirs), strict=True
        ):
            projected_TH = own_TH if self._projection is None else self._projection(own_TH)
            squares = F.mse_loss(projected_TH.to(wide), teacher_TH.to(wide), reduction="sum")
            loss_sum = loss_sum + squares / teacher_TH.shape[1]
        return TermSums(loss_sum, self.targets(batch))
