"""The settings of a fine-tuning, the grid of settings that a task's lists of values describe, and the result or the
errors of a fine-tuning."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import product
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from launcher.after.tasks.metrics import Predictions
from launcher.errors import OptionError, RunError

Pooling = Literal["class", "cls", "mean", "max"]
Layers = Literal["last", "last_four", "weighted"]
MACHINE = {"microbatch", "precision", "threads"}
"""Settings that depend on the machine. The fine-tuning on an intermediate task (`after`) uses the same values."""


class FinetuneSettings(BaseModel):
    """The settings of a fine-tuning, except its seed. The defaults are BERT's (Devlin et al. 2019, appendix A.3).

    Attributes:
        lr: peak learning rate.
        epochs: number of passes over the training split.
        batch: number of examples in an update; for tagging and span, number of windows.
        microbatch: number of examples (or windows) in memory at a time; None: the whole batch.
        warmup: share of the updates in which the learning rate rises linearly; then it falls linearly to zero.
        weight_decay: decoupled weight decay of AdamW; biases and LayerNorm have none.
        adam_betas, adam_epsilon: coefficients of AdamW.
        clip: largest norm of the gradient.
        layer_decay: learning rate of each layer as a share of the rate of the layer above it (ELECTRA: 0.8 base, 0.9
            large); the head has `lr`, the embeddings the lowest rate. ALBERT's shared layer counts as one.
        reinit_layers: number of top layers that are drawn anew, together with the pooler (Zhang et al. 2021).
        freeze: whether the encoder keeps its weights and uses no dropout, so that only the head learns.
        pooling: pooling of a text's vector. `class`: that of the family's class in transformers. `cls`, `mean` and
            `max` over the tokens need our own head, so the export is an encoder with the head beside it.
        layers: layers that the head reads. `last_four`: concatenated. `weighted`: the sum of all with learned weights
            (Peters et al. 2018). All but `last` need our own head, as in `pooling`.
        dropout: dropout rate of the encoder; None: that of its configuration.
        task_dropout: dropout rate before the head's output; None: that of the class in transformers.
        max_length: largest number of tokens of an input, including special ones; None: that of the model.
        stride: number of tokens that two windows of one text share (tagging, span).
        max_query: number of tokens after which a question is cut (span).
        max_answer: largest number of tokens of an answer (span).
        patience: number of epochs without a better result on dev after which training stops; None: it never does.
        keep: the epoch whose weights are kept.
        precision: `bf16` computes the matrix products of forward passes in bfloat16 (torch's autocast).
        threads: number of threads of the processor. It is a setting because it may change the last bits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(default=3e-5, gt=0)
    epochs: int = Field(default=3, ge=1)
    batch: int = Field(default=32, ge=1)
    microbatch: int | None = Field(default=None, ge=1)
    warmup: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = Field(default=1e-6, gt=0)
    clip: float = Field(default=1.0, gt=0)
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    reinit_layers: int = Field(default=0, ge=0)
    freeze: bool = False
    pooling: Pooling = "class"
    layers: Layers = "last"
    dropout: float | None = Field(default=None, ge=0, lt=1)
    task_dropout: float | None = Field(default=None, ge=0, lt=1)
    max_length: int | None = Field(default=None, ge=8)
    stride: int = Field(default=128, ge=0)
    max_query: int = Field(default=64, ge=1)
    max_answer: int = Field(default=30, ge=1)
    patience: int | None = Field(default=None, ge=1)
    keep: Literal["best", "last"] = "best"
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas {self.adam_betas} are not both at least 0 and below 1")
        if self.freeze and self.reinit_layers:
            raise ValueError("freeze keeps layers that reinit_layers draws anew: use one of the two settings")
        if self.freeze and self.layer_decay < 1:
            raise ValueError(
                "freeze leaves no layer whose rate layer_decay could set: use one of the two settings"
            )
        return self


def candidates(defaults: Mapping[str, object], chosen: Mapping[str, object]) -> tuple[FinetuneSettings, ...]:
    """Return every combination of the values in a task's `defaults`, each of which is a value or a list of values.
    `chosen` values replace defaults.

    Combinations follow the order of the lists, and the last key varies fastest. A single fine-tuning uses the first.

    Raises OptionError if a key is no setting, or a value is not allowed.
    """
    given = {**defaults, **chosen}
    for name in given:
        if name not in FinetuneSettings.model_fields:
            close = get_close_matches(name, FinetuneSettings.model_fields, n=1)
            raise OptionError(
                f"there is no fine-tuning setting {name!r}",
                remedy=f"did you mean {close[0]}?"
                if close
                else f"use one of {', '.join(FinetuneSettings.model_fields)}",
            )
    lists = [_values(name, given[name]) for name in given]
    try:
        return tuple(
            FinetuneSettings.model_validate(dict(zip(given, values, strict=True)))
            for values in product(*lists)
        )
    except ValidationError as error:
        raise OptionError(
            f"fine-tuning settings: {_told(error)}",
            remedy="correct the task's `finetune` block or the option",
        ) from error


def _values(name: str, value: object) -> list[object]:
    """Return the values of a setting. A value of adam_betas is itself a pair, so only a list of pairs counts as a list
    of values."""
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise OptionError(f"fine-tuning setting {name} is an empty list", remedy="give a value")
    pair = name == "adam_betas" and not isinstance(value[0], list | tuple)
    return [value] if pair else list(value)


def _told(error: ValidationError) -> str:
    details: Iterable[str] = (
        f"{'.'.join(str(part) for part in detail['loc'])} {detail['input']}: {detail['msg']}"
        if detail["loc"]
        else detail["msg"]
        for detail in error.errors()
    )
    return "; ".join(details)


Tags = tuple[tuple[int, ...], ...]


class TaskMismatch(RunError):
    """The error if a task does not fit the checkpoint or the settings."""


class Diverged(RunError):
    """The error if the loss or the gradient of a fine-tuning is not finite."""


@dataclass(frozen=True)
class Epoch:
    """A completed epoch.

    Attributes:
        epoch: number of the epoch, from 1.
        loss: mean loss of its updates.
        metrics: metrics on dev after the epoch, by name.
    """

    epoch: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FinetuneOutcome:
    """The result of a fine-tuning, measured at the chosen epoch.

    Attributes:
        metrics: metrics on dev, by name.
        best_epoch: number of the chosen epoch, from 1.
        curves: all completed epochs.
        losses: loss per target of every update, computed before the update.
        predictions: predictions on dev, in the form that `launcher.after.tasks.metrics.score` takes.
        threshold: threshold for "no answer", tuned on dev; None if every question of the task has an answer.
        others: metrics on the task's other labelled splits, by split. They were not used for any choice.
    """

    metrics: Mapping[str, float]
    best_epoch: int
    curves: tuple[Epoch, ...]
    losses: tuple[float, ...]
    predictions: Predictions
    threshold: float | None = None
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return the fields for the file of results: all but predictions and single losses."""
        return {
            "metrics": dict(self.metrics),
            "others": {split: dict(metrics) for split, metrics in self.others.items()},
            "best_epoch": self.best_epoch,
            "curves": [asdict(epoch) for epoch in self.curves],
            "threshold": self.threshold,
        }
