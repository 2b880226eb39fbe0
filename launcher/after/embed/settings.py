"""The settings of `maskfleet embed train`: one YAML file, typed. Errors name file, line, path, value and remedy."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from data_service.ingest.encodings import UTF_8
from launcher.after.export.sentence_transformer import Pooling
from launcher.after.tasks.schema import TextEncoding
from launcher.errors import RecipeError
from launcher.runtime.recipe import document as recipe_yaml

_WORDS = recipe_yaml.Words("training's settings", "maskfleet embed settings nli", RecipeError)
_SUFFIX = ".yaml"
_NAME = "launcher.after.embed"


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Encoding(_Settings):
    """How a text becomes a vector.

    Attributes:
        pooling: over the last layer; None: as the folder says, and `mean` (Sentence-BERT's best) where it says nothing.
        normalize: whether vectors have length 1; None: as the folder says, and no where it says nothing.
        max_length: tokens of a text, special ones included; longer ones are cut. None: the model's own length.
        prompts: by name, put before a text. `query` and `document` are used by retrieval.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_length: Annotated[int, Field(ge=4)] | None = None
    prompts: dict[str, str] = Field(default_factory=dict)


class Softmax(_Settings):
    """Classes of pairs, from (u, v, |u - v|). Sentence-BERT (1908.10084), section 3, classification objective."""

    kind: Literal["softmax"]


class Cosine(_Settings):
    """Squared error of the cosine to a score from 0 to 1. Sentence-BERT, section 3, regression objective."""

    kind: Literal["cosine"]


class Triplet(_Settings):
    """The positive nearer to the anchor than the negative, by a margin. Sentence-BERT, section 3, triplet objective."""

    kind: Literal["triplet"]
    margin: PositiveFloat = 5.0
    distance: Literal["euclidean", "cosine", "manhattan"] = "euclidean"


class MultipleNegatives(_Settings):
    """Each anchor's positive among all positives and negatives of the batch (InfoNCE).

    Attributes:
        scale: by which cosines are multiplied; 1 / temperature.
        mini_batch: rows at a time in the cached form (GradCache, 2101.06983); memory follows them, not `batch`.
            None: the plain form.
        symmetric: each positive must find its anchor, too.
    """

    kind: Literal["multiple_negatives"]
    scale: PositiveFloat = 20.0
    mini_batch: PositiveInt | None = None
    symmetric: bool = False


class Cosent(_Settings):
    """Pairs with higher scores have higher cosines, for all pairs of pairs in the batch (CoSENT)."""

    kind: Literal["cosent"]
    scale: PositiveFloat = 20.0


class Angle(_Settings):
    """As `cosent`, with the angle between complex vectors in place of the cosine (AnglE, 2309.12871)."""

    kind: Literal["angle"]
    scale: PositiveFloat = 20.0


Loss = Annotated[Softmax | Cosine | Triplet | MultipleNegatives | Cosent | Angle, Field(discriminator="kind")]


Column = str | int


class RowSource(_Settings):
    """Where rows come from: pairs of `tasks`, or `files` of any columns.

    Attributes:
        tasks: names or YAML files of tasks with pairs of texts; their rows are put together.
        split: of the tasks.
        files: .jsonl, .tsv, .csv or .parquet, the text ones also with .gz or .zst; read one after another.
        encoding: of text files, as Python names it; a byte order mark says it, too.
        published: where the files can be had.
        texts: columns in the order of the loss: (anchor, positive, negatives...), or the two of a pair. A column is a
            name, or a number from 1 where no first line names them.
        label: column of the class or score.
        classes: names of the classes as they stand there, for softmax.
        scores: the lowest and highest score there can be; they become 0 and 1.
        where: rows count only if these columns have these values, as in files that hold several splits.
        ignore: labels whose rows are left out, such as SNLI's "-".
        prompts: names of the prompts put before each column of texts, in the same order; null for none.
    """

    tasks: tuple[str, ...] = ()
    split: str = "train"
    files: tuple[str, ...] = ()
    encoding: TextEncoding = UTF_8
    published: str | None = None
    texts: tuple[Column, ...] = ()
    label: Column | None = None
    classes: tuple[str, ...] | None = Field(default=None, min_length=2)
    scores: tuple[float, float] = (0.0, 1.0)
    where: dict[str, str] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    prompts: tuple[str | None, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.tasks) == bool(self.files):
            raise ValueError("give either tasks or files")
        if self.tasks and (self.texts or self.label is not None or self.classes or self.where or self.ignore):
            raise ValueError("tasks know their own texts and labels: leave those keys out")
        if self.files and len(self.texts) < 2:
            raise ValueError("texts must name two columns or more")
        for names in (self.texts, self.classes or ()):
            if len(set(names)) < len(names):
                raise ValueError(f"a name is given twice in {', '.join(map(str, names))}")
        if self.label in self.texts:
            raise ValueError(f"{self.label} is both a text and the label")
        if not self.scores[0] < self.scores[1]:
            raise ValueError(
                f"scores go from {self.scores[0]:g} to {self.scores[1]:g}: the lowest comes first"
            )
        if self.prompts and len(self.prompts) != len(self.texts or "12"):
            raise ValueError(
                f"prompts has {len(self.prompts)} entries, and there are {len(self.texts or '12')} texts"
            )
        return self

    @property
    def columns(self) -> tuple[Column, ...]:
        """Every column that is read, once."""
        found = [*self.texts, *self.where, *([self.label] if self.label is not None else [])]
        return tuple(dict.fromkeys(found))


class EmbedTraining(Encoding):
    """Everything of one training but the model it starts from.

    Attributes:
        matryoshka: lengths at which a vector's beginning must work by itself, too (2205.13147).
        batch: rows a step.
        lr: the highest; it rises for `warmup` of the steps, then falls to 0 in a line.
        every: steps between two checkpoints, and two measurements on `dev`; None: an epoch.
        keep: with `dev`, whether the best or the last measured weights are exported.
        deterministic: equal bits on a GPU too, where that is slower. A CPU always gives them.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    train: RowSource
    dev: RowSource | None = None
    loss: Loss
    matryoshka: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1)
    batch: PositiveInt = 16
    lr: PositiveFloat = 2e-5
    epochs: PositiveInt = 1
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = False
    every: PositiveInt | None = None
    keep: Literal["best", "last"] = "best"

    _root: str | None = PrivateAttr(default=None)

    @property
    def root(self) -> str | None:
        """Folder or s3:// URI to which the files' paths are relative; None: the present folder."""
        return self._root

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if isinstance(self.loss, Softmax) and self.matryoshka is not None:
            raise ValueError("matryoshka does not go with softmax: its classifier has one width")
        if isinstance(self.loss, MultipleNegatives) and self.batch < 2:
            raise ValueError("batch = 1 has no negatives: multiple_negatives needs 2 and more")
        for source in (self.train, self.dev):
            unknown = {name for name in source.prompts if name} - set(self.prompts) if source else set()
            if unknown:
                raise ValueError(f"there is no prompt {', '.join(sorted(unknown))} in prompts")
        return self


def bundled() -> list[str]:
    """Names of the settings that come with Maskfleet."""
    found = (resources.files(_NAME) / "library").iterdir()
    return sorted(path.name.removesuffix(_SUFFIX) for path in found if path.name.endswith(_SUFFIX))


def bundled_text(name: str) -> str:
    """Return the YAML of bundled settings. Raises RecipeError: there are none of that name."""
    if name not in bundled():
        raise RecipeError(f"there are no settings {name!r}", remedy=f"choose one of {', '.join(bundled())}")
    return (resources.files(_NAME) / "library" / f"{name}{_SUFFIX}").read_text("utf-8")


def load_settings(source: str, assignments: Sequence[str] = (), data: str | None = None) -> EmbedTraining:
    """Return the settings in a YAML file, or bundled ones by name, with each `a.b=value` of `assignments`.

    `data` is the folder or s3:// URI that holds the data. Without it paths in a file are relative to that file.
    Raises RecipeError: no such file, or a mistake in it.
    """
    path = Path(source)
    home = None if source in bundled() else str(path.parent)
    if source in bundled():
        text = bundled_text(source)
    elif path.is_file():
        text = _read(path)
    else:
        raise RecipeError(
            f"{source} is neither a file nor bundled settings",
            remedy=f"give a YAML file, or {', '.join(bundled())}",
        )
    document = recipe_yaml.override(recipe_yaml.parse(text, source, _WORDS), assignments)
    training = recipe_yaml.validate(EmbedTraining, document)
    training._root = home if data is None else data
    return training


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", remedy="give a YAML file") from error
