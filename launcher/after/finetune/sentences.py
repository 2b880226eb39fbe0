"""The task kinds classification, pair_classification and regression: one or two texts with one label."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from launcher.after.finetune.inputs import Head, InputRow, Logits, Pieces, Prepared
from launcher.after.finetune.settings import TaskMismatch
from launcher.after.tasks.examples import Sentences
from launcher.errors import reason

_AT_ONCE = 1000  # number of texts in one call of the tokenizer


@dataclass(frozen=True)
class SentenceKind:
    """A kind of task with one label or score for each text or pair.

    Attributes:
        pieces: the tokenizer.
        labels: names of the labels; empty for regression.
        truncation: how a pair is cut that is too long: `longest_first`, `only_first` or `only_second`.
    """

    pieces: Pieces
    labels: tuple[str, ...]
    truncation: str

    head: Head = "SequenceClassification"

    @property
    def outputs(self) -> int:
        return len(self.labels) or 1

    def prepare(self, examples: Sentences) -> Prepared:
        """Return a row for each example. Raises TaskMismatch if a label is none of the task's, or a text cannot be
        cut."""
        _check_labels(examples.labels, self.labels)
        rows: list[InputRow] = []
        for start in range(0, len(examples), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            second = None if examples.second is None else list(examples.second[part])
            encoded = self._encoded(list(examples.first[part]), second)
            types = encoded.get("token_type_ids") or [None] * len(encoded["input_ids"])
            rows += map(self.pieces.row, encoded["input_ids"], types, np.asarray(examples.labels[part]))
        longest = max(map(len, rows), default=0)
        if longest > self.pieces.max_length:
            raise TaskMismatch(
                f"a pair has {longest:,} tokens of the text that truncation {self.truncation} keeps whole, more than "
                f"max_length {self.pieces.max_length:,}",
                remedy="set the task's truncation to longest_first",
            )
        return Prepared(rows)

    def _encoded(self, first: list[str], second: list[str] | None) -> Any:
        cut = "only_first" if second is None else self.truncation
        try:
            return self.pieces.tokenizer(first, second, truncation=cut, max_length=self.pieces.max_length)
        except Exception as error:  # the library has no error class for a text that is too short to cut
            raise TaskMismatch(
                f"texts cannot be cut to max_length {self.pieces.max_length:,} with truncation {cut}: {reason(error)}",
                remedy="set the task's truncation to longest_first",
            ) from error

    def targets(self, rows: Sequence[InputRow], width: int) -> Tensor:
        """Return the targets of rows: [rows] int64 labels, or float32 scores."""
        values = np.array([row.target for row in rows])
        return torch.from_numpy(values if self.labels else values.astype(np.float32))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.labels:
            return F.cross_entropy(logits, targets, reduction="sum")
        return F.mse_loss(logits[:, 0], targets, reduction="sum")

    def count(self, rows: Sequence[InputRow]) -> int:
        return len(rows)

    def predictions(self, logits: Sequence[Logits]) -> NDArray[np.int64] | NDArray[np.float64]:
        """Return the predicted labels or scores: [examples]."""
        found = np.stack(logits)
        return found.argmax(-1).astype(np.int64) if self.labels else found[:, 0].astype(np.float64)


def _check_labels(values: NDArray[np.int64] | NDArray[np.float64], labels: tuple[str, ...]) -> None:
    if not labels and not np.isfinite(values).all():
        raise TaskMismatch("a score of the task is not a finite number", remedy="correct the data")
    if labels and not (np.issubdtype(values.dtype, np.integer) and np.isin(values, range(len(labels))).all()):
        raise TaskMismatch(
            f"labels of the examples are not among the task's: {', '.join(labels)}",
            remedy="list every label in the task's `labels`",
        )
