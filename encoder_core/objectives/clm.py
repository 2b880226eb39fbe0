"""Next-token prediction: predicts each target from the states of the token before it, on causal rows."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.clm import ClmConfig


class NextTokens(HeadTerm, of=ClmConfig):
    """Cross-entropy of the targets' ids by the states before them; metric "correct".

    Rows that are not causal have no targets: they belong to the term of masked tokens beside this one.
    """

    def __init__(self, config: ClmConfig, shared: Shared) -> None:
        self.head = shared.head()
        super().__init__(config, {"head": self.head})
        self._alone = True

    def connect(self, others: Mapping[str, HeadTerm]) -> None:
        self._alone = others.keys() == {self.name}

    def targets(self, batch: Batch) -> int:
        """Return the number of targets.

        Raises:
            ModelError: the rows are not causal, and no other term could be trained on them.
        """
        if batch.causal:
            return batch.target_ids.numel()
        if self._alone and batch.rows:
            raise ModelError(
                "clm is the only objective, but the rows are not causal: each token would see what it predicts",
                remedy="set objective.clm in the recipe, with which the data service makes causal rows",
            )
        return 0

    def sums(self, states: States, batch: Batch) -> TermSums:
        if batch.causal:
            hidden_MH, ids_M = before_targets(states, batch), batch.target_ids
        else:
            hidden_MH, ids_M = states.target_states[:0], batch.target_ids[:0]
        at_M = torch.arange(len(ids_M), device=ids_M.device)
        found = self.head(hidden_MH, at_M, ids_M)
        return TermSums(found.loss_sum, len(ids_M), {"correct": found.correct})


def before_targets(states: States, batch: Batch) -> Float[Tensor, "targets hidden"]:
    """Return the last layer's output at the token before each target. A row's first token is never a target."""
    before_M: Int[Tensor, " targets"] = batch.target_positions - 1
    return states.all_states.index_select(0, before_M)
