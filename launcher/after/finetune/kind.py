"""The interface between a kind of task and the training loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from launcher.after.finetune.inputs import InputRow

Logits = NDArray[np.float32]
"""Of one row: [outputs], or [pieces, outputs] where the head looks at each piece."""
Head = Literal["SequenceClassification", "TokenClassification", "QuestionAnswering"]


@dataclass(frozen=True)
class Prepared:
    """Examples as rows. Each kind adds what it needs to turn predictions for rows into predictions for examples."""

    rows: list[InputRow]


class TaskKind(Protocol):
    """Attributes:
    head: transformers' classes for it are called `AutoModelFor` and this.
    outputs: numbers for each row, or for each piece.
    """

    @property
    def head(self) -> Head: ...

    @property
    def outputs(self) -> int: ...

    def targets(self, rows: Sequence[InputRow], width: int) -> Tensor:
        """Of rows padded to `width`: [rows], [rows, width] or [rows, 2]."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss summed over targets, from [rows, outputs] or [rows, width, outputs]."""

    def count(self, rows: Sequence[InputRow]) -> int:
        """Targets of the rows, over which the loss is a mean."""
