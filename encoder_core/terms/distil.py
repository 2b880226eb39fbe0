"""Distillation, as a recipe describes it: teachers, and which of their outputs a student learns.

The papers, and how it is computed: `objectives/distil.py`.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import linear_weights
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

    def shrink(self, form: SmallObjective) -> "DistilConfig":
        """Return the term with the small forms of the teachers."""
        teachers = tuple(
            source.model_copy(update={"model": form.model(source.model)}) for source in self.teachers
        )
        return self.model_copy(update={"teachers": teachers, "layers": None})

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
        yield from self._layer_refusals(setting)

    def _layer_refusals(self, setting: Setting) -> Iterator[Refusal]:
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

    def weights(self, model: ModelConfig) -> int:
        return 0 if self.projection is None else linear_weights(model.hidden, self.projection)

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

    def shrink(self, form: SmallObjective) -> "HiddenConfig":
        """Return the term without projection, because all small networks have the same width."""
        return self.model_copy(update={"layers": None, "projection": None})

    def teacher_layers(self, student: int, teacher: int) -> tuple[int, ...]:
        """Return the numbers of the teacher's states in the order of the student's; `student` and `teacher` are
        numbers of layers.
        """
        if self.layers is not None:
            return self.layers
        return tuple(round(number * teacher / student) for number in range(student + 1))
