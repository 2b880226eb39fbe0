"""Masked language modelling: encoder and head as the one module that the engine wraps."""

from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.build import ModelConfig, build_encoder
from encoder_core.heads.mlm import MaskedLanguageModelHead
from encoder_core.layers.encoder import Encoder
from encoder_core.layers.kernels import Attend, automatic
from encoder_core.objectives.losses import LossSums, Term


class MaskedLanguageModel(nn.Module):
    """Cross-entropy of the original ids at the target positions (BERT, section 3.1; RoBERTa).

    Terms: "mlm".
    """

    def __init__(self, encoder: Encoder, head: MaskedLanguageModelHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    @staticmethod
    def target_counts(batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        return {"mlm": batch.target_ids.numel()}

    def forward(self, batch: Batch) -> LossSums:
        """Sums for this batch; metrics: "mlm_correct"."""
        loss_sum, correct = self.head(self.encoder(batch), batch.target_positions, batch.target_ids)
        term = Term("mlm", loss_sum, self.target_counts(batch)["mlm"])
        return LossSums((term,), {"mlm_correct": correct})

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids at the target positions."""
        return self.head.logits(self.encoder(batch).index_select(0, batch.target_positions))


def masked_language_model(
    config: ModelConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> MaskedLanguageModel:
    """Encoder and head of any family on the current default device; weights not yet initialised
    (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    encoder = build_encoder(config, checkpoint_activations=checkpoint_activations, attend=attend)
    head = MaskedLanguageModelHead(
        config.hidden, encoder.embeddings.word, activation=config.head_activation, eps=config.layer_norm_eps
    )
    return MaskedLanguageModel(encoder, head)
