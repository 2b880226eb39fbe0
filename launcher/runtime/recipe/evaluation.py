"""The recipe's `evaluation.tasks`: what is measured of every checkpoint while a run trains."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from data_service.formats import StrictRecord
from launcher.runtime.recipe.parts import Choice

Pooling = Literal["cls", "mean", "max"]
"""How a text's hidden states become one vector: the state of the class token; or, over all tokens including special
ones, the mean or the largest value in each dimension."""
Poolings = Annotated[list[Pooling], Field(min_length=1)]


class HeldOutSettings(StrictRecord):
    """Held-out loss by length and by source.

    Attributes:
        rows: number of rows, as rows of the run's own length, for each length and source.
    """

    rows: PositiveInt = 128


class ProbeSettings(StrictRecord):
    """A linear probe of a classification task.

    Attributes:
        task: name of a bundled task, or the path of a task's file.
        data: folder or s3:// URI with the files that the task names.
        examples: largest number of examples of a split. Larger splits are sampled, the same way every time.
        pooling: how a text's vector is made.
    """

    task: str = Field(min_length=1)
    data: str | None = None
    examples: PositiveInt = 2000
    pooling: Pooling = "mean"


class SimilaritySettings(StrictRecord):
    """Cosines of vectors compared with the scores of a similarity task. Fields are as in `ProbeSettings`."""

    task: str = Field(min_length=1)
    data: str | None = None
    poolings: Poolings = Field(default=["cls", "mean"])


class EvaluationTask(Choice):
    """One measure; exactly one field is given."""

    heldout: HeldOutSettings | None = None
    probe: ProbeSettings | None = None
    similarity: SimilaritySettings | None = None

    @model_validator(mode="after")
    def _exactly_one_given(self) -> Self:
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise ValueError("give exactly one of heldout, probe and similarity")
        return self

    @property
    def measure(self) -> str:
        """The name of the field that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def named_task(self) -> ProbeSettings | SimilaritySettings | None:
        """The settings, if they name a task with its own data; else None."""
        return self.probe or self.similarity

    @property
    def name(self) -> str:
        """The measure and its task as people read them, such as `heldout` or `probe sst2`."""
        named = self.named_task
        if named is None:
            return self.measure
        return f"{self.measure} {named.task.rpartition('/')[2].removesuffix('.yaml')}"


def _expand_shorthand(value: object) -> object:
    """Return `{heldout: {}}` for the text `heldout`; other values unchanged."""
    return {value: {}} if isinstance(value, str) else value


Tasks = tuple[Annotated[EvaluationTask, BeforeValidator(_expand_shorthand)], ...]
