"""What is measured of every checkpoint while a run trains, as its recipe says it (`evaluation.tasks`)."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from launcher.runtime.recipe.parts import Choice

Pooling = Literal["cls", "mean", "max"]
"""How a text's hidden states become one vector: the class token's; the mean, or the largest value in each dimension,
over all tokens, special ones included."""
Poolings = Annotated[list[Pooling], Field(min_length=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeldOutSettings(_Settings):
    """Held-out loss by length and by source. `rows`: of the run's own length, for each of them."""

    rows: PositiveInt = 128


class AnisotropySettings(_Settings):
    """Of so many texts, half of them to fit the whitening on.

    Attributes:
        task: name of a bundled task, or the path of a task's file, whose texts they are (dev); None: sentences of the
            run's held-out text.
        data: folder or s3:// URI with the files that the task names.
        texts: how many at most.
    """

    task: str | None = None
    data: str | None = None
    texts: PositiveInt = 2000
    poolings: Poolings = ["cls", "mean"]


class ProbeSettings(_Settings):
    """A linear probe of a classification task.

    Attributes:
        task: name of a bundled task, or the path of a task's file.
        data: folder or s3:// URI with the files that the task names.
        examples: most of each split; of larger ones a sample, the same one every time.
        pooling: of hidden states.
    """

    task: str = Field(min_length=1)
    data: str | None = None
    examples: PositiveInt = 2000
    pooling: Pooling = "mean"


class SimilaritySettings(_Settings):
    """Cosines against scores of a similarity task; fields as in `ProbeSettings`."""

    task: str = Field(min_length=1)
    data: str | None = None
    poolings: Poolings = ["cls", "mean"]


class EvaluationTask(Choice):
    """Exactly one measure."""

    heldout: HeldOutSettings | None = None
    anisotropy: AnisotropySettings | None = None
    probe: ProbeSettings | None = None
    similarity: SimilaritySettings | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise ValueError("give exactly one of heldout, anisotropy, probe and similarity")
        return self

    @property
    def measure(self) -> str:
        """Which one it is, by its field's name."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def named_task(self) -> ProbeSettings | SimilaritySettings | AnisotropySettings | None:
        """The settings that name a task with data of its own, if any do."""
        return self.probe or self.similarity or (self.anisotropy if self.task_name else None)

    @property
    def task_name(self) -> str | None:
        """Of that task, or its file's path."""
        of = self.probe or self.similarity or self.anisotropy
        return None if of is None else of.task

    @property
    def name(self) -> str:
        """For people: `heldout`, `probe sst2`."""
        name = self.task_name
        if name is None:
            return self.measure
        return f"{self.measure} {name.rpartition('/')[2].removesuffix('.yaml')}"


def _spelt(value: object) -> object:
    """`heldout` alone is `heldout: {}`."""
    return {value: {}} if isinstance(value, str) else value


Tasks = tuple[Annotated[EvaluationTask, BeforeValidator(_spelt)], ...]
