"""What was measured, as figures: of the runs of one folder, or kept in a file, so that a page outlives the folders of
the machines that computed it.

Figures of several folders belong on one page if they are of the same text and the same settings; `basis` says of which.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.after.compare.found import Spread
from launcher.errors import OptionError

from .published import Published

Source = Literal["untrained", "pretrained", "simcse", "pairs"]


class Seen(Spread):
    """A figure of one or several seeds, or of none, by seed."""

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def n(self) -> int:
        return len(self.values)

    def gain(self, before: "Seen") -> "Seen":
        """The differences of the seeds that both have."""
        found = self.less(before)
        return Seen({} if found is None else found.values)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Counted(_Part):
    """Losses by counting, in nats a hidden token."""

    unigram: float
    bigram: float


class Detection(_Part):
    """Of a discriminator: the share of held-out tokens that it judges right, and that are original."""

    right: float
    original: float


class RunFigures(_Part):
    """Of a run that was trained to its end; what was not measured is not there.

    Attributes:
        tokens: trained on.
        losses: held-out, in nats a hidden token, by step.
        frozen: by step (0: the beginning), then by what was measured.
        finetuned: the main metric on a task's test split, by task; `scratch`: from the weights the run began with.
        similarity: Spearman's correlation by task, then by the model whose vectors they are.
    """

    tokens: int
    losses: dict[int, float]
    frozen: dict[int, dict[str, float]]
    counted: Counted | None = None
    detection: Detection | None = None
    finetuned: dict[str, float] = {}
    scratch: dict[str, float] = {}
    similarity: dict[str, dict[Source, float]] = {}


class Basis(_Part):
    """What runs must have in common to stand on one page.

    Attributes:
        text: bytes of the files of each kind of text. digest: of the text, the tasks and all settings.
        examples: by task of the text's domain, how many its test split has and what naming one label achieves.
        sts: the tasks of similarity.
    """

    digest: str
    text: dict[str, int]
    examples: dict[str, str]
    sts: tuple[str, ...]


class Figures(_Part):
    """By family, then by seed."""

    basis: Basis
    runs: dict[str, dict[int, RunFigures]]
    published: Published | None = None

    def loss(self, family: str, step: int) -> Seen:
        """Held-out, after `step` steps."""
        return _seen(self.runs[family], lambda run: run.losses.get(step))

    def frozen(self, family: str, step: int, name: str) -> Seen:
        """`probe sst2`, `similarity sts-...`, ... of the weights after `step` steps."""
        return _seen(self.runs[family], lambda run: run.frozen.get(step, {}).get(name))

    def finetuned(self, family: str, task: str, *, trained: bool) -> Seen:
        """The task's main metric on its test split."""
        return _seen(self.runs[family], lambda run: (run.finetuned if trained else run.scratch).get(task))

    def similarity(self, family: str, task: str, source: Source) -> Seen:
        return _seen(self.runs[family], lambda run: run.similarity.get(task, {}).get(source))

    def over(self, earlier: "Figures") -> "Figures":
        """These, and of `earlier` the runs that are not among them."""
        families = [*self.runs, *(family for family in earlier.runs if family not in self.runs)]
        runs = {name: earlier.runs.get(name, {}) | self.runs.get(name, {}) for name in families}
        ordered = {name: dict(sorted(found.items())) for name, found in runs.items()}
        return self.model_copy(update={"runs": ordered, "published": self.published or earlier.published})


def _seen(runs: Mapping[int, RunFigures], of: Callable[[RunFigures], float | None]) -> Seen:
    values = {seed: of(run) for seed, run in runs.items()}
    return Seen({seed: value for seed, value in values.items() if value is not None})


def keep(figures: Figures, file: Path) -> Figures:
    """`figures` and those that `file` has beside them, which it has then, too.

    Raises OptionError: what it has is of another text or of other settings, or it is no such file.
    """
    if file.exists():
        try:
            earlier = Figures.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise OptionError(
                f"--figures {file}: no figures of this program", remedy="name another file"
            ) from error
        if earlier.basis.digest != figures.basis.digest:
            raise OptionError(
                f"--figures {file}: of another text, or of other settings, than this folder",
                remedy="name another file, or move this one away",
            )
        figures = figures.over(earlier)
    file.write_text(figures.model_dump_json(indent=1, exclude_none=True) + "\n", "utf-8")
    return figures
