"""The replaced-token-detection head of ELECTRA. Shapes: T tokens, H hidden."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from encoder_core.layers.feed_forward import Activation, activate


class DetectionSums(NamedTuple):
    """Sums over tokens: of the loss (fp32 or wider); of right verdicts, of tokens that were replaced, of tokens
    taken for replaced, and of those that were both (int64)."""

    loss_sum: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    replaced: Int[Tensor, ""]
    flagged: Int[Tensor, ""]
    found: Int[Tensor, ""]


class ReplacedTokenHead(nn.Module):
    """Linear, activation, Linear to one score a token (ELECTRA, section 2); positive means replaced."""

    def __init__(self, hidden: int, *, activation: Activation) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.dense = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)

    def logits(self, hidden_TH: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
        score_T1: Tensor = self.score(activate(self.dense(hidden_TH), self.activation))
        return score_T1.squeeze(-1)

    def forward(
        self, hidden_TH: Float[Tensor, "tokens hidden"], replaced_T: Bool[Tensor, " tokens"]
    ) -> DetectionSums:
        """Binary cross-entropy of every token, and counts for precision and recall."""
        logits_T = self.logits(hidden_TH)
        if logits_T.element_size() < 4:
            logits_T = logits_T.float()
        loss_sum = F.binary_cross_entropy_with_logits(
            logits_T, replaced_T.to(logits_T.dtype), reduction="sum"
        )
        flagged_T = logits_T > 0
        return DetectionSums(
            loss_sum,
            (flagged_T == replaced_T).sum(),
            replaced_T.sum(),
            flagged_T.sum(),
            (flagged_T & replaced_T).sum(),
        )
