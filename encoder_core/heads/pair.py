"""The sentence-pair head: next sentence (BERT) or sentence order (ALBERT). Shapes: R rows, T tokens, H hidden."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class PairSums(NamedTuple):
    """Sums over labelled rows: of the loss (fp32 or wider) and of correct predictions (int64)."""

    loss_sum: Float[Tensor, ""]
    correct: Int[Tensor, ""]


class PairHead(nn.Module):
    """The first token through Linear and tanh (the pooler), then Linear to two classes (BERT, section 3.1).

    Class 0: the second segment continues the first, in order. Class 1: it is a random one (next sentence) or the
    two are swapped (sentence order).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 2)

    def logits(self, first_RH: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows 2"]:
        """Scores of the two classes from the hidden states of the rows' first tokens."""
        logits_R2: Tensor = self.classifier(self.pooler(first_RH).tanh())
        return logits_R2

    def forward(self, first_RH: Float[Tensor, "rows hidden"], labels_R: Int[Tensor, " rows"]) -> PairSums:
        """R may be 0."""
        logits_R2 = self.logits(first_RH)
        if logits_R2.element_size() < 4:
            logits_R2 = logits_R2.float()
        loss_sum = F.cross_entropy(logits_R2, labels_R, reduction="sum")
        return PairSums(loss_sum, (logits_R2.argmax(-1) == labels_R).sum())
