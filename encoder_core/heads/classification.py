"""Heads with two classes: for sentence pairs (BERT's next sentence prediction, ALBERT's sentence order prediction) and
for replaced tokens (ELECTRA, DeBERTa v3).

Shapes: R rows, T tokens, H hidden.
"""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from encoder_core.layers.encoder import activate
from encoder_core.layers.sizes import Activation


class PairSums(NamedTuple):
    """Sums over labelled rows: the loss (fp32 or wider), and the number of correct predictions (int64)."""

    loss_sum: Float[Tensor, ""]
    correct: Int[Tensor, ""]


class PairHead(nn.Module):
    """Linear and tanh (the pooler), then Linear to two classes, on a row's first token (BERT, section 3.1).

    Class 0: the second segment follows the first, in order. Class 1: the second segment is random (next sentence
    prediction), or the two segments are swapped (sentence order prediction).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, 2)

    def logits(self, first_RH: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows 2"]:
        """Return scores of the two classes from the hidden states of the rows' first tokens."""
        logits_R2: Tensor = self.classifier(self.pooler(first_RH).tanh())
        return logits_R2

    def forward(self, first_RH: Float[Tensor, "rows hidden"], labels_R: Int[Tensor, " rows"]) -> PairSums:
        """Return the loss and the correct predictions, summed over rows; R may be 0."""
        logits_R2 = self.logits(first_RH)
        if logits_R2.element_size() < 4:
            logits_R2 = logits_R2.float()
        loss_sum = F.cross_entropy(logits_R2, labels_R, reduction="sum")
        return PairSums(loss_sum, (logits_R2.argmax(-1) == labels_R).sum())


class DetectionSums(NamedTuple):
    """Sums over tokens: the loss (fp32 or wider), and counts (int64).

    Attributes:
        correct: number of tokens that were classified correctly.
        replaced: number of tokens that were replaced.
        flagged: number of tokens that were classified as replaced.
        found: number of replaced tokens that were classified as replaced.
    """

    loss_sum: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    replaced: Int[Tensor, ""]
    flagged: Int[Tensor, ""]
    found: Int[Tensor, ""]


class ReplacedTokenHead(nn.Module):
    """Linear, activation, Linear to one score per token (ELECTRA, section 2). A positive score means replaced.

    With `context_eps` the input at each token is LayerNorm(h_first + h), with this epsilon, where h_first is the state
    of the row's first token (microsoft/DeBERTa, rtd_task.py).
    """

    def __init__(self, hidden: int, *, activation: Activation, context_eps: float | None = None) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.norm = nn.LayerNorm(hidden, eps=context_eps) if context_eps is not None else None
        self.dense = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)

    def forward(
        self, hidden_TH: Float[Tensor, "tokens hidden"], first_T: Int[Tensor, " tokens"]
    ) -> Float[Tensor, " tokens"]:
        """Return the score of each token. `first_T`: flat index of the first token of each token's row."""
        if self.norm is not None:
            hidden_TH = self.norm(hidden_TH.index_select(0, first_T) + hidden_TH)
        score_T1: Tensor = self.score(activate(self.dense(hidden_TH), self.activation))
        return score_T1.squeeze(-1)


def detection_sums(scores_T: Float[Tensor, " tokens"], replaced_T: Bool[Tensor, " tokens"]) -> DetectionSums:
    """Return the binary cross-entropy, summed over tokens, and counts for accuracy, precision and recall."""
    if scores_T.element_size() < 4:
        scores_T = scores_T.float()
    loss_sum = F.binary_cross_entropy_with_logits(scores_T, replaced_T.to(scores_T.dtype), reduction="sum")
    flagged_T = scores_T > 0
    found, correct = (flagged_T & replaced_T).sum(), (flagged_T == replaced_T).sum()
    return DetectionSums(loss_sum, correct, replaced_T.sum(), flagged_T.sum(), found)
