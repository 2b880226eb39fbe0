"""Distillation, as a recipe describes it: teachers, and which of their outputs a student learns.

The papers, and how it is computed: `objectives/distil.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from encoder_core.cost.activations import Activations, kept_by_head
from encoder_core.cost.flops import head
from encoder_core.cost.products import Product, Shape, times, without_gradient
from encoder_core.cost.saved import FP32, Saved
from encoder_core.cost.states import NOTHING, CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.terms.term import HeadConfig, Refusal, Setting, SmallObjective

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
