"""The device half of a made-up objective, as a newcomer writes it: which token stood at a place before tokens moved.

`tests/architecture/test_habit_of_an_objective.py` copies it to encoder_core/objectives/.
"""

import torch

from encoder_core.batch import Batch
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.objectives.term import HeadTerm, States, TermSums
from encoder_core.terms.term import HeadConfig


class ShuffledTokens(HeadTerm):
    """Cross-entropy of the original ids; metrics "correct" and "moved", whether another token stands there now."""

    def __init__(self, config: HeadConfig, head: MaskedLanguageModelHead) -> None:
        super().__init__(config, {"head": head})
        self.head = head

    def targets(self, batch: Batch) -> int:
        return batch.target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        hidden_MH = states.at_targets
        at_M = torch.arange(len(hidden_MH), device=hidden_MH.device)
        found = self.head(hidden_MH, at_M, batch.target_ids, None, None)
        moved = (batch.tokens[batch.target_positions] != batch.target_ids).sum()
        return TermSums(found.loss_sum, self.targets(batch), {"correct": found.correct, "moved": moved})
