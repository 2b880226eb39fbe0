"""What `maskfleet embed train` is told: one YAML file, typed. Mistakes have file, line, path, value and remedy."""

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from launcher import recipe_yaml
from launcher.embed.modules import Pooling
from launcher.errors import RecipeError

_SUFFIX = ".yaml"
_NAME = "launcher.embed"


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


class Table(_Settings):
    """Rows of texts, with a label or a score each.

    Attributes:
        files: .jsonl, .tsv, .csv or .parquet, the first three also with .gz; local or s3://. Read one after another.
        header: the columns' names, for .tsv and .csv whose first line is a row already.
        texts: columns of the texts in the order of the loss: (anchor, positive, negatives...), or the two of a pair.
        label: column of the class or score.
        classes: names of the classes as they stand there, for softmax.
        scores: the lowest and highest score there can be; they become 0 and 1.
        where: rows count only if these columns have these values, as in files that hold several splits.
        ignore: labels whose rows are left out, such as SNLI's "-".
        prompts: by column of `texts`, the name of the prompt that is put before.
    """

    files: tuple[str, ...] = Field(min_length=1)
    header: tuple[str, ...] | None = None
    texts: tuple[str, ...] = Field(min_length=2)
    label: str | None = None
    classes: tuple[str, ...] | None = Field(default=None, min_length=2)
    scores: tuple[float, float] = (0.0, 1.0)
    where: dict[str, str] = Field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    prompts: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for names in (self.texts, self.classes or (), self.header or ()):
            if len(set(names)) < len(names):
                raise ValueError(f"a name is given twice in {', '.join(names)}")
        if self.label in self.texts:
            raise ValueError(f"{self.label} is both a text and the label")
        if not self.scores[0] < self.scores[1]:
            raise ValueError(
                f"scores go from {self.scores[0]:g} to {self.scores[1]:g}: the lowest comes first"
            )
        if self.header is not None and (missing := self.columns - set(self.header)):
            raise ValueError(f"the header has no {', '.join(sorted(missing))}")
        if foreign := set(self.prompts) - set(self.texts):
            raise ValueError(f"prompts for {', '.join(sorted(foreign))}, which are no texts")
        return self

    @property
    def columns(self) -> set[str]:
        """Every column that is read."""
        return {*self.texts, *self.where, *([self.label] if self.label is not None else [])}


class Training(Encoding):
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
    train: Table
    dev: Table | None = None
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

    @model_validator(mode="after")
    def _loss_and_data(self) -> Self:
        _check_rows(self.loss, self.train)
        if isinstance(self.loss, Softmax) and self.matryoshka is not None:
            raise ValueError("matryoshka does not go with softmax: its classifier has one width")
        if isinstance(self.loss, MultipleNegatives) and self.batch < 2:
            raise ValueError("batch = 1 has no negatives: multiple_negatives needs 2 and more")
        for table in (self.train, self.dev):
            unknown = set(table.prompts.values()) - set(self.prompts) if table else set()
            if unknown:
                raise ValueError(f"there is no prompt {', '.join(sorted(unknown))} in prompts")
        if self.dev is not None and self.dev.classes is not None:
            raise ValueError("dev has classes: vectors are measured by scores of pairs, or by triplets")
        if self.dev is not None and len(self.dev.texts) != (3 if self.dev.label is None else 2):
            raise ValueError("dev must be pairs with a score (label), or triplets without")
        return self


def _check_rows(loss: Loss, table: Table) -> None:
    """Raises ValueError: the rows of `table` are not what `loss` compares."""
    texts = len(table.texts)
    match loss:
        case Softmax():
            fits = texts == 2 and table.label is not None and table.classes is not None
            wanted = "two texts, a label and its classes"
        case Cosine() | Cosent() | Angle():
            fits = texts == 2 and table.label is not None and table.classes is None
            wanted = "two texts and a score as label, without classes"
        case Triplet():
            fits, wanted = texts == 3 and table.label is None, "three texts and no label"
        case MultipleNegatives():
            fits, wanted = table.label is None, "two texts or more and no label"
    if not fits:
        raise ValueError(f"the loss {loss.kind} needs {wanted} in train")


def bundled() -> list[str]:
    """Names of the settings that come with Maskfleet."""
    found = (resources.files(_NAME) / "library").iterdir()
    return sorted(path.name.removesuffix(_SUFFIX) for path in found if path.name.endswith(_SUFFIX))


def load_settings(source: str, assignments: tuple[str, ...] = ()) -> Training:
    """The settings in a YAML file, or bundled ones by name, with each `a.b=value` of `assignments`.

    Raises RecipeError: no such file, or a mistake in it.
    """
    path = Path(source)
    if source in bundled():
        text = (resources.files(_NAME) / "library" / f"{source}{_SUFFIX}").read_text("utf-8")
    elif path.is_file():
        text = _read(path)
    else:
        raise RecipeError(
            f"{source} is neither a file nor bundled settings",
            remedy=f"give a YAML file, or {', '.join(bundled())}",
        )
    document = recipe_yaml.override(recipe_yaml.parse(text, source), assignments)
    return recipe_yaml.validate(Training, document)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", remedy="give a YAML file") from error
