"""Permuted language modelling (Yang et al. 2019, section 2.2): encoder and head as the module the engine wraps."""

from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import TrainingError
from encoder_core.families import xlnet
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.heads.prediction import PermutationHead
from encoder_core.layers.xlnet_encoder import Memory, Streams, TwoStreamEncoder
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term


class PermutedLanguageModel(ObjectiveModule):
    """Cross-entropy of the ids at the target positions, each predicted from what comes before it in the
    factorisation order.

    Terms: "plm".
    """

    def __init__(self, encoder: TwoStreamEncoder, head: PermutationHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        return {"plm": batch.target_ids.numel()}

    def forward(self, batch: Batch, memory: Memory | None = ()) -> LossSums:
        """Sums for this batch; metrics: "plm_correct".

        `memory` is that of the same rows' previous tokens, () where there is none, and comes back moved on; None for
        rows without a future either.
        """
        streams = self.encoder.streams(batch, memory)
        sums = self.head(_query(streams), batch.target_ids)
        term = Term("plm", sums.loss_sum, batch.target_ids.numel())
        return LossSums((term,), {"plm_correct": sums.correct}, memory=streams.memory)

    def logits(self, batch: Batch, memory: Memory | None = None) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids at the target positions."""
        return self.head.logits(_query(self.encoder.streams(batch, memory)))


def _query(streams: Streams) -> Tensor:
    if streams.query is None:
        raise TrainingError(
            "a batch without a factorisation order cannot train a permuted language model",
            remedy="set objective: plm in the recipe, which draws the order",
        )
    return streams.query


def permuted_language_model(
    config: XlnetConfig, *, checkpoint_activations: bool = False
) -> PermutedLanguageModel:
    """Encoder and head on the current default device; weights not yet initialised (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    encoder = xlnet.build(config, checkpoint_activations=checkpoint_activations)
    return PermutedLanguageModel(encoder, PermutationHead(encoder.embeddings.word))
