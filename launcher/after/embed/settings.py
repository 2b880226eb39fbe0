"""The settings of `maskfleet embed train`: one YAML file, typed. Errors name file, line, path, value and remedy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from data_service.ingest.encodings import UTF_8
from launcher.after.export.sentence_transformer import Pooling
from launcher.after.tasks.schema import TextEncoding
from launcher.after.tasks.task import bundled_yaml_texts, read_yaml
from launcher.errors import RecipeError
from launcher.runtime.recipe import document as recipe_yaml

# How messages name this kind of document, and the command that shows a complete one.
_DOCUMENT_WORDING = recipe_yaml.DocumentWording("training's settings", "maskfleet embed settings nli", RecipeError)


class _SettingsModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EncodingSettings(_SettingsModel):
    """The settings by which a text becomes a vector.

    Attributes:
        pooling: pooling over the last layer; None: the folder's, or `mean` (Sentence-BERT's best) if it has none.
        normalize: whether vectors are scaled to length 1; None: as in the folder, or not if the folder has no setting.
        max_length: number of tokens, including special ones, after which a text is cut; None: the model's own length.
        prompts: texts that are put before a text, by name. Retrieval uses `query` and `document`.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_length: Annotated[int, Field(ge=4)] | None = None
    prompts: dict[str, str] = Field(default_factory=dict)


class MiningSettings(EncodingSettings):
    """The settings of a search for hard negatives.

    Attributes:
        negatives: number of negatives of each example.
        share: a negative's cosine must be below c - (1 - share) * |c|, where c is the positive's cosine.
        batch: number of texts in a batch; it changes the vectors only by rounding errors.
    """

    negatives: PositiveInt = 1
    share: Annotated[float, Field(gt=0, le=1)] = 0.95
    batch: PositiveInt = 32


class SoftmaxLoss(_SettingsModel):
    """A loss that predicts the class of a pair from (u, v, |u - v|). Sentence-BERT (1908.10084), section 3,
    classification objective."""

    kind: Literal["softmax"]


class CosineLoss(_SettingsModel):
    """The squared error between the cosine and a score from 0 to 1. Sentence-BERT, section 3, regression objective."""

    kind: Literal["cosine"]


class TripletLoss(_SettingsModel):
    """A loss that moves the positive nearer to the anchor than the negative, by a margin. Sentence-BERT, section 3,
    triplet objective."""

    kind: Literal["triplet"]
    margin: PositiveFloat = 5.0
    distance: Literal["euclidean", "cosine", "manhattan"] = "euclidean"


class MultipleNegativesLoss(_SettingsModel):
    """A loss that identifies each anchor's positive among all positives and negatives of the batch (InfoNCE).

    Attributes:
        scale: factor of cosines, 1 / temperature.
        mini_batch: number of rows at a time in the cached form (GradCache, 2101.06983), whose memory depends on this
            number and not on `batch`; None: the plain form.
        symmetric: whether the loss also identifies each positive's anchor.
    """

    kind: Literal["multiple_negatives"]
    scale: PositiveFloat = 20.0
    mini_batch: PositiveInt | None = None
    symmetric: bool = False


class OrderingLoss(_SettingsModel):
    """A loss that gives pairs with higher scores higher cosines, over all pairs of pairs in the batch (`cosent`); or
    the same with the angle between complex vectors in place of the cosine (`angle`: AnglE, 2309.12871)."""

    kind: Literal["cosent", "angle"]
    scale: PositiveFloat = 20.0


LossSettings = Annotated[
    SoftmaxLoss | CosineLoss | TripletLoss | MultipleNegativesLoss | OrderingLoss, Field(discriminator="kind")
]


ColumnKey = str | int  # a column's name, or its number from 1


class RowSource(_SettingsModel):
    """The source of rows: pairs of `tasks`, or `files` with any columns.

    Attributes:
        tasks: names or YAML files of tasks with pairs of texts, whose rows are concatenated.
        split: split of the tasks.
        files: .jsonl, .tsv, .csv or .parquet files, text files also with .gz or .zst; read one after another.
        encoding: Python's name of the text files' encoding; a byte order mark overrides it.
        published: place where the files are published, for messages.
        texts: columns as the loss takes them: (anchor, positive, negatives...), or the two texts of a pair. A column
            is a name, or a number from 1 if no first line names the columns.
        label: column of the class or score.
        classes: names of the classes as the files spell them, for softmax.
        scores: lowest and highest possible score, which become 0 and 1.
        where: values that columns must have for a row to count, as in files that hold several splits.
        ignore: labels whose rows are left out, such as SNLI's "-".
        prompts: names of the prompts that are put before each column of texts, in the same order; null for none.
    """

    tasks: tuple[str, ...] = ()
    split: str = "train"
    files: tuple[str, ...] = ()
    encoding: TextEncoding = UTF_8
    published: str | None = None
    texts: tuple[ColumnKey, ...] = ()
    label: ColumnKey | None = None
    classes: tuple[str, ...] | None = Field(default=None, min_length=2)
    scores: tuple[float, float] = (0.0, 1.0)
    where: dict[str, str] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    prompts: tuple[str | None, ...] = ()

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if bool(self.tasks) == bool(self.files):
            raise ValueError("give either tasks or files")
        if self.tasks and (self.texts or self.label is not None or self.classes or self.where or self.ignore):
            raise ValueError("tasks have their own texts and labels: leave out texts, label, classes, where, ignore")
        if self.files and len(self.texts) < 2:
            raise ValueError("texts must name two columns or more")
        for names in (self.texts, self.classes or ()):
            if len(set(names)) < len(names):
                raise ValueError(f"a name occurs twice in {', '.join(map(str, names))}")
        if self.label in self.texts:
            raise ValueError(f"{self.label} is both a text and the label")
        if not self.scores[0] < self.scores[1]:
            raise ValueError(f"scores go from {self.scores[0]:g} to {self.scores[1]:g}: give the lowest first")
        if self.prompts and len(self.prompts) != len(self.texts or "12"):  # tasks have two texts
            raise ValueError(f"prompts has {len(self.prompts)} entries, but there are {len(self.texts or '12')} texts")
        return self

    @property
    def columns(self) -> tuple[ColumnKey, ...]:
        """All columns to read, without repetition."""
        found = [*self.texts, *self.where, *([self.label] if self.label is not None else [])]
        return tuple(dict.fromkeys(found))


class EmbedTrainingSettings(EncodingSettings):
    """The settings of an embedding training, except the model from which it starts.

    Attributes:
        matryoshka: lengths to which vectors can be cut: the loss is also computed on the cut vectors (2205.13147).
        batch: number of rows in a step.
        lr: peak learning rate. It rises during the share `warmup` of the steps, then falls linearly to 0.
        every: number of steps between two measurements on `dev`; None: one measurement after each epoch.
        keep: with `dev`, whether the best or the last measured weights are exported.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    train: RowSource
    dev: RowSource | None = None
    loss: LossSettings
    matryoshka: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1)
    batch: PositiveInt = 16
    lr: PositiveFloat = 2e-5
    epochs: PositiveInt = 1
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    precision: Literal["fp32", "bf16"] = "fp32"
    every: PositiveInt | None = None
    keep: Literal["best", "last"] = "best"

    _root: str | None = PrivateAttr(default=None)

    @property
    def data_folder(self) -> str | None:
        """Folder or s3:// URI to which the files' paths are relative; None: the current folder."""
        return self._root

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if isinstance(self.loss, SoftmaxLoss) and self.matryoshka is not None:
            raise ValueError("matryoshka cannot be used with softmax, whose classifier takes vectors of one width")
        if isinstance(self.loss, MultipleNegativesLoss) and self.batch < 2:
            raise ValueError("batch = 1 has no negatives: multiple_negatives needs a batch of 2 or more")
        for source in (self.train, self.dev):
            unknown = {name for name in source.prompts if name} - set(self.prompts) if source else set()
            if unknown:
                raise ValueError(f"there is no prompt {', '.join(sorted(unknown))} in prompts")
        return self


def bundled_settings() -> Mapping[str, str]:
    """Return the YAML of the bundled settings, by name."""
    return bundled_yaml_texts("launcher.after.embed", "library")


def read_bundled_settings(name: str) -> str:
    """Return the YAML of the bundled settings `name`. Raises RecipeError if there are none of that name."""
    if name not in bundled_settings():
        raise RecipeError(f"there are no settings {name!r}", remedy=f"choose one of {', '.join(bundled_settings())}")
    return bundled_settings()[name]


def load_settings(source: str, assignments: Sequence[str] = (), data: str | None = None) -> EmbedTrainingSettings:
    """Return the settings in a YAML file, or bundled settings by name, changed by `assignments` (`a.b=value`).

    `data`: folder or s3:// URI of the data. Without it, paths in a file are relative to that file. Raises RecipeError
    if there is no such file, or the settings have a mistake; TaskError if the file is not text.
    """
    if source not in bundled_settings() and not Path(source).is_file():
        raise RecipeError(
            f"{source} is neither a file nor bundled settings",
            remedy=f"give a YAML file, or {', '.join(bundled_settings())}",
        )
    text = bundled_settings()[source] if source in bundled_settings() else read_yaml(source)
    document = recipe_yaml.apply_assignments(recipe_yaml.parse_document(text, source, _DOCUMENT_WORDING), assignments)
    training = recipe_yaml.validate(EmbedTrainingSettings, document)
    home = None if source in bundled_settings() else str(Path(source).parent)
    training._root = home if data is None else data
    return training
