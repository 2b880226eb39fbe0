"""The settings of a fine-tuning, the grid that a task's lists of values describe, and the result."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from launcher.errors import OptionError, RunError
from launcher.runtime.recipe.document import DocumentWording, RecipeDocument, validate

# How messages name a document with these settings, and the command that shows a complete one.
DOCUMENT_WORDING = DocumentWording("fine-tuning", "maskfleet tasks show sst2", OptionError)
# Settings of versions before 0.3.0, which are errors now.
_RETIRED_SETTINGS = ("reinit_layers", "freeze", "pooling", "layers", "dropout", "task_dropout", "threads")


class FinetuneSettings(BaseModel):
    """The settings of a fine-tuning, except its seed. The defaults are BERT's (Devlin et al. 2019, appendix A.3).

    Attributes:
        lr: peak learning rate.
        epochs: number of passes over the training split.
        batch: number of examples in an update; for tagging and span, number of windows.
        microbatch: number of examples (or windows) in memory at a time, a divisor of `batch`; None: the whole batch.
            The loss is the mean over microbatches.
        warmup: share of the updates in which the learning rate rises linearly; then it falls linearly to zero.
        weight_decay: decoupled weight decay of AdamW; biases and LayerNorm have none.
        adam_betas, adam_epsilon: coefficients of AdamW.
        clip: largest norm of the gradient.
        layer_decay: learning rate of each layer as a share of the rate of the layer above it (ELECTRA: 0.8 base, 0.9
            large); the head has `lr`, the embeddings the lowest rate. ALBERT's shared layer counts as one.
        max_length: largest number of tokens of an input, including special ones; None: that of the model.
        stride: number of tokens that two windows of one text share (tagging, span).
        max_query: number of tokens after which a question is cut (span).
        max_answer: largest number of tokens of an answer (span).
        patience: number of epochs without a better result on dev after which training stops; None: it never does.
        keep: the epoch whose weights are kept: the best on dev, or the last.
        precision: `bf16` computes the matrix products of forward passes in bfloat16 (torch's autocast).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(default=3e-5, gt=0)
    epochs: int = Field(default=3, ge=1)
    batch: int = Field(default=32, ge=1)
    microbatch: int | None = Field(default=None, ge=1)
    warmup: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = Field(default=1e-6, gt=0)
    clip: float = Field(default=1.0, gt=0)
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    max_length: int | None = Field(default=None, ge=8)
    stride: int = Field(default=128, ge=0)
    max_query: int = Field(default=64, ge=1)
    max_answer: int = Field(default=30, ge=1)
    patience: int | None = Field(default=None, ge=1)
    keep: Literal["best", "last"] = "best"
    precision: Literal["fp32", "bf16"] = "fp32"

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {self.adam_betas} must both be at least 0 and below 1")
        if self.microbatch is not None and self.batch % self.microbatch:
            raise ValueError(f"microbatch {self.microbatch} does not divide batch {self.batch}")
        if self.patience is not None and self.keep == "last":
            raise ValueError("patience cannot be used with keep: last, which would keep a worse epoch than the best")
        return self


def settings_grid(given: Mapping[str, object]) -> tuple[FinetuneSettings, ...]:
    """Return every combination of the `given` settings, each of which is a value or a list of values.

    Combinations follow the order of the lists, and the last key varies fastest. A single fine-tuning uses the first.

    Raises OptionError if a key is not a setting, or a value is not allowed.
    """
    if retired := [name for name in given if name in _RETIRED_SETTINGS]:
        raise OptionError(
            f"the fine-tuning setting {retired[0]!r} was removed in version 0.3.0",
            remedy="leave it out, or fine-tune an export (`maskfleet checkpoints export`) with other software",
        )
    lists = [_setting_values(name, given[name]) for name in given]
    return tuple(
        validate(
            FinetuneSettings,
            RecipeDocument(dict(zip(given, values, strict=True)), DOCUMENT_WORDING.noun, {}, words=DOCUMENT_WORDING),
        )
        for values in product(*lists)
    )


def _setting_values(name: str, value: object) -> list[object]:
    """Return the values of a setting, which is a value or a list of values. For adam_betas, whose value is a pair, only
    a list of pairs counts as a list of values."""
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise OptionError(f"fine-tuning setting {name} is an empty list", remedy="give a value")
    pair = name == "adam_betas" and not isinstance(value[0], list | tuple)
    return [value] if pair else list(value)


class TaskMismatch(RunError):
    """The error if a task, a checkpoint and the settings do not fit together."""


class TrainingDiverged(RunError):
    """The error if the loss or the outputs of a fine-tuning are not finite."""


@dataclass(frozen=True)
class Epoch:
    """A completed epoch, counted from 1: mean loss of its updates, and metrics on dev by name."""

    epoch: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FinetuneOutcome:
    """The result of a fine-tuning, measured at the chosen epoch.

    Attributes:
        metrics: metrics on dev, by name, the task's main metric first.
        best_epoch: number of the chosen epoch, from 1.
        curves: all completed epochs.
        threshold: threshold for "no answer", tuned on dev; None if every question of the task has an answer.
        others: metrics on the task's other labelled splits, by split. They were not used for any choice.
    """

    metrics: Mapping[str, float]
    best_epoch: int
    curves: tuple[Epoch, ...]
    threshold: float | None = None
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_record(self) -> dict[str, object]:
        """Return all fields as plain data."""
        return asdict(self)
