"""Permuted language modelling (Yang et al. 2019, section 2.2): XLNet's encoder and head."""

from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import TrainingError
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.layers.xlnet_encoder import Memory, Streams, TwoStreamEncoder
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule, Term


class PermutedLanguageModel(ObjectiveModule):
    """Cross-entropy of the ids at the target positions, each predicted from the tokens before it in the factorisation
    order.

    Terms: "plm".
    """

    def __init__(self, encoder: TwoStreamEncoder, head: MaskedLanguageModelHead, weight: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.weight = weight

    def target_counts(self, batch: Batch) -> dict[str, int]:
        return {"plm": batch.target_ids.numel()}

    def forward(self, batch: Batch, memory: Memory | None = ()) -> LossSums:
        """Return the sums for this batch, and the memory for the next step; metrics: "plm_correct".

        `memory`: returned for the rows that these rows continue; () for the first rows. None: memory is neither used
        nor returned.
        """
        streams = self.encoder.streams(batch, memory)
        sums = self.head(_query_states(streams), None, batch.target_ids)
        term = Term("plm", sums.loss_sum, batch.target_ids.numel(), self.weight)
        return LossSums((term,), {"plm_correct": sums.correct}, memory=streams.memory)

    def logits(self, batch: Batch, memory: Memory | None = None) -> Float[Tensor, "targets vocab"]:
        """Return the logits of all ids at the target positions."""
        return self.head.logits(_query_states(self.encoder.streams(batch, memory)))


def _query_states(streams: Streams) -> Tensor:
    """Return the query stream's states; raise TrainingError if the batch had no factorisation order."""
    if streams.query is None:
        raise TrainingError(
            "a batch without a factorisation order cannot train a permuted language model",
            remedy="set objective.plm and input.packing lanes in the recipe, so that the data service draws an order",
        )
    return streams.query
