"""What is compared and what is held equal, as `comparison.yaml` says it."""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from data_service.tokenizers.specials import Style
from data_service.tokenizers.tokenizer import Kind
from launcher.after.finetune.settings import FinetuneSettings

Share = Annotated[float, Field(gt=0, lt=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Short(_Part):
    """Rows of the first `share` of the steps have `length` tokens."""

    length: PositiveInt
    share: Share


class Pretraining(_Part):
    """What every run has in common.

    Attributes:
        tokens: trained on, special ones included. batch: of them a step.
        short: rows at first. length: tokens of the rows after that.
        warmup: share of the steps.
        points: checkpoints that are kept, evenly spaced.
        seeds: a run each.
        settings: of the recipe, in place of those of its small form.
    """

    tokens: PositiveInt
    batch: PositiveInt
    short: Short
    length: PositiveInt
    warmup: Share
    points: PositiveInt
    seeds: tuple[PositiveInt, ...]
    settings: dict[str, object]

    @property
    def steps(self) -> int:
        """A multiple of `points`."""
        return max(1, self.tokens // self.batch // self.points) * self.points

    @property
    def measured(self) -> range:
        """The steps after which weights are measured, the beginning included."""
        return range(0, self.steps + 1, self.steps // self.points)


class Family(_Part):
    """A bundled recipe, the kind of tokenizer it was published with, and its special tokens (None: the kind's usual).

    `settings`: of the recipe, in place of the common ones.
    """

    recipe: str
    tokenizer: Kind
    specials: Style | None = None
    settings: dict[str, object] = {}


class Domain(_Part):
    """Tasks made of proposals: documents that have several of the `sections`, each label with its headings.

    Attributes:
        dev, test: shares of the proposals.
        train_examples, dev_examples, test_examples: most of a task's splits.
    """

    dev: Share
    test: Share
    train_examples: PositiveInt
    dev_examples: PositiveInt
    test_examples: PositiveInt
    sections: dict[str, tuple[str, ...]]


class Vectors(_Part):
    """Contrastive training of these families' last checkpoints. `batch`: examples a step."""

    families: tuple[str, ...]
    steps: PositiveInt
    batch: PositiveInt
    lr: PositiveFloat


class Comparison(_Part):
    """See `comparison.yaml`."""

    vocabulary: PositiveInt
    sample: PositiveInt
    heldout: Share
    weights: dict[str, Share]
    pretraining: Pretraining
    families: dict[str, Family]
    domain: Domain
    finetuning: FinetuneSettings
    vectors: Vectors


def read_comparison(path: Path) -> Comparison:
    """Raises ValidationError: it says something else than a comparison."""
    return Comparison.model_validate(yaml.safe_load(path.read_text("utf-8")))
