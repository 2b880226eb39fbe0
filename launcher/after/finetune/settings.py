"""The settings of a fine-tuning, the grid of settings that a task's lists of values describe, and what a fine-tuning
ends with: its result, or an error."""

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
"""Settings that are of the machine: a fine-tuning that comes before another has the same."""


class FinetuneSettings(BaseModel):
    """One fine-tuning, but for its seed. The defaults are BERT's (Devlin et al. 2019, appendix A.3).

    Attributes:
        lr: peak learning rate.
        epochs: passes over the training split.
        batch: examples an update; of tagging and span, windows.
        microbatch: as many of them at a time in memory; None: the whole batch.
        warmup: share of the updates in which the rate rises linearly; it falls linearly to zero in the others.
        weight_decay: of AdamW, decoupled; none for biases and LayerNorm.
        adam_betas, adam_epsilon: of AdamW.
        clip: largest norm of the gradient.
        layer_decay: the rate of each layer as a share of the rate of the layer above it (ELECTRA: 0.8 base, 0.9
            large); the head has `lr`, the embeddings the lowest. ALBERT's shared layer counts as one.
        reinit_layers: so many top layers begin anew, and the pooler with them (Zhang et al. 2021).
        freeze: the encoder keeps its weights and uses no dropout; only the head learns.
        pooling: what a text's vector is. `class`: as the family's own class of transformers does it; `cls`, `mean` and
            `max` over the tokens have a head of ours, so the export is an encoder and that head beside it.
        layers: which layers the head reads. `last_four`: concatenated; `weighted`: the sum of all with learned
            weights (Peters et al. 2018). Any but `last` has a head of ours, as `pooling`.
        dropout: of the encoder; None: as its configuration says.
        task_dropout: before the head's output; None: as the class of transformers does it.
        max_length: tokens of an input, special ones included; None: as many as the model takes.
        stride: tokens that two windows of one text share (tagging, span).
        max_query: tokens of a question, which is cut there (span).
        max_answer: tokens of the longest answer (span).
        patience: stop after so many epochs without a better result on dev; None: never.
        keep: the epoch whose weights are kept.
        precision: `bf16` computes the matrix products of forward passes in bfloat16 (torch's autocast).
        threads: of the processor. Another number may change the last bits, so it is one of the settings.
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
            raise ValueError("freeze keeps what reinit_layers throws away: use one of them")
        if self.freeze and self.layer_decay < 1:
            raise ValueError("freeze leaves no layer whose rate layer_decay could set: use one of them")
        return self


def candidates(defaults: Mapping[str, object], chosen: Mapping[str, object]) -> tuple[FinetuneSettings, ...]:
    """Return every combination of the values in a task's `defaults`, each a value or a list of them; `chosen` ones go
    first.

    In the order of the lists, the last key fastest: the first is what one fine-tuning uses.

    Raises OptionError: a key that is no setting, or a value that cannot be.
    """
    given = {**defaults, **chosen}
    for name in given:
        if name not in FinetuneSettings.model_fields:
            close = get_close_matches(name, FinetuneSettings.model_fields, n=1)
            raise OptionError(
                f"there is no fine-tuning setting {name!r}",
                remedy=f"did you mean {close[0]}?"
                if close
                else f"there are {', '.join(FinetuneSettings.model_fields)}",
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
    """adam_betas is a pair itself, so only a list of pairs is a list of values."""
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
    """A task that this checkpoint, or these settings, cannot learn."""


class Diverged(RunError):
    """A fine-tuning whose loss or gradient became infinite or no number."""


@dataclass(frozen=True)
class Epoch:
    """An epoch that was trained.

    Attributes:
        epoch: from 1.
        loss: mean over its updates.
        metrics: on dev after it, by name.
    """

    epoch: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FinetuneOutcome:
    """The kept epoch of one fine-tuning.

    Attributes:
        metrics: on dev, by name.
        best_epoch: from 1.
        curves: every epoch that was trained.
        losses: of every update, per target, before it.
        predictions: on dev, in the form that `launcher.after.tasks.metrics.score` takes.
        threshold: of the score of no answer, tuned on dev; None where the task knows no such thing.
        others: metrics on the task's other splits with labels, by split. Nothing was chosen by them.
    """

    metrics: Mapping[str, float]
    best_epoch: int
    curves: tuple[Epoch, ...]
    losses: tuple[float, ...]
    predictions: Predictions
    threshold: float | None = None
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """Return what a result's file says of it: all but predictions and single losses."""
        return {
            "metrics": dict(self.metrics),
            "others": {split: dict(metrics) for split, metrics in self.others.items()},
            "best_epoch": self.best_epoch,
            "curves": [asdict(epoch) for epoch in self.curves],
            "threshold": self.threshold,
        }
