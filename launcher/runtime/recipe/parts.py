"""Parts of a recipe without heavy imports, because pages, lists of runs and sinks import them, too: tasks that evaluate
every checkpoint while a run trains (`evaluation.tasks`), trackers, webhooks, weight checks.

Secrets come from the environment, never from a recipe.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from data_service.formats import StrictRecord
from launcher.runtime.recipe.document import KeyPath


class SparseRecord(StrictRecord):
    """A part of a recipe with optional fields. Fields that are None are left out of the YAML."""

    @model_serializer(mode="wrap")
    def _leave_out_none(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        every = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in every.items() if value is not None}


@dataclass(frozen=True)
class RecipeIssue:
    """A mistake in a recipe: `what` is wrong at `path`, and the `remedy`."""

    path: KeyPath
    what: str
    remedy: str


Pooling = Literal["cls", "mean", "max"]
"""How a text's hidden states become one vector: the state of the class token; or, over all tokens including special
ones, the mean or the largest value in each dimension."""
Poolings = Annotated[list[Pooling], Field(min_length=1)]


class HeldOutSettings(StrictRecord):
    """Held-out loss by length and by source.

    Attributes:
        rows: amount of text for each length and source, as a number of rows of the run's own length.
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
    """A similarity task: cosines of text vectors are compared with people's scores. Fields as in `ProbeSettings`."""

    task: str = Field(min_length=1)
    data: str | None = None
    poolings: Poolings = Field(default=["cls", "mean"])


class EvaluationTask(SparseRecord):
    """One evaluation of each checkpoint; exactly one field is set."""

    heldout: HeldOutSettings | None = None
    probe: ProbeSettings | None = None
    similarity: SimilaritySettings | None = None

    @model_validator(mode="after")
    def _exactly_one_given(self) -> Self:
        if len(self.given) != 1:
            raise ValueError("give exactly one of heldout, probe and similarity")
        return self

    @property
    def measure(self) -> str:
        """The name of the field that is set."""
        return next(iter(self.given))

    @property
    def named_task(self) -> ProbeSettings | SimilaritySettings | None:
        """The settings of the probe or similarity task; None for held-out loss."""
        return self.probe or self.similarity

    @property
    def name(self) -> str:
        """The name for people, such as `heldout` or `probe sst2`."""
        named = self.named_task
        if named is None:
            return self.measure
        return f"{self.measure} {named.task.rpartition('/')[2].removesuffix('.yaml')}"


def _expand_shorthand(value: object) -> object:
    """Return `{heldout: {}}` for the string `heldout`, and so on; return values other than strings unchanged."""
    return {value: {}} if isinstance(value, str) else value


Tasks = tuple[Annotated[EvaluationTask, BeforeValidator(_expand_shorthand)], ...]


_CHECK_INTERVAL_STEPS = 100  # steps between weight checks at ZeRO 0, where damage stays until a check finds it


class Wandb(StrictRecord):
    """A run of Weights & Biases. The key is in WANDB_API_KEY, or where `wandb login` stores it.

    Attributes:
        project, entity: project and entity of the run. `entity` null: the entity of the key.
        mode: `offline` writes files for `wandb sync` into the run's folder; for a run in object storage, into the
            folder that WANDB_DIR names.
    """

    project: str = Field(min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class Mlflow(StrictRecord):
    """A run of MLflow. User and password, if any, are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Attributes:
        uri: URI of the tracking server. Null: the value of MLFLOW_TRACKING_URI.
        experiment: name of the experiment, which is created if it does not exist.
    """

    uri: str | None = None
    experiment: str = Field(default="maskfleet", min_length=1)

    @field_validator("uri")
    @classmethod
    def _holds_no_secret(cls, uri: str | None) -> str | None:
        if uri is not None and holds_login(uri):
            raise ValueError("a URI with a user name would be recorded with the run: set MLFLOW_TRACKING_USERNAME")
        return uri


def holds_login(uri: str) -> bool:
    """Return whether the URI may contain a user name or a password."""
    try:
        return "@" in urlsplit(uri).netloc
    except ValueError:
        return "@" in uri


class Events(StrictRecord):
    """The receiver of a run's events.

    Attributes:
        webhook_env: name of the environment variable of `maskfleet train` that holds the URL to which events are
            posted. None: events are not posted.
    """

    webhook_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class WeightCheck(StrictRecord):
    """How often the ranks' weights are compared. They are also compared at every commit.

    Attributes:
        every: number of steps between comparisons; null: at commits only. `auto`: 1 at ZeRO 1 and 2, where damage lasts
            only until the next update and a comparison takes two reductions; 100 at ZeRO 0, where damage stays.
    """

    every: PositiveInt | Literal["auto"] | None = "auto"

    def interval(self, zero: int) -> int | None:
        """Return the number of steps between comparisons at ZeRO stage `zero`. None: no comparisons between commits, as
        at stage 3, where each weight is on one rank only."""
        if zero == 3 or self.every is None:
            return None
        if self.every == "auto":
            return _CHECK_INTERVAL_STEPS if zero == 0 else 1
        return self.every


_NAMED_CORPUS = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)=(.+)", re.DOTALL)  # NAME=URI[@WEIGHT]


@dataclass(frozen=True)
class CorpusOption:
    """A value of `--corpus [NAME=]URI[@WEIGHT]`. Without NAME, the name is the last part of the URI."""

    name: str
    uri: str
    weight: float | None

    @classmethod
    def parse(cls, text: str) -> "CorpusOption":
        named = _NAMED_CORPUS.fullmatch(text)
        rest = named[2] if named else text
        uri, weight = rest, None
        before, at, after = rest.rpartition("@")
        if at and (number := _float_or_none(after)) is not None:
            uri, weight = before, number
        last = re.sub(r"[^A-Za-z0-9_-]+", "_", uri.rstrip("/").rpartition("/")[2]).strip("_")
        return cls(named[1] if named else last or "text", uri, weight)


def _float_or_none(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
