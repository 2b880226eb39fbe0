"""Masked language modelling: encoder and head as the one module that the engine wraps."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.build import AnyEncoder, ModelConfig, build_encoder
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.heads.cross_entropy import CrossEntropySums
from encoder_core.heads.prediction import EnhancedMaskDecoder, MaskedLanguageModelHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term


class MaskedLanguageModel(ObjectiveModule):
    """Cross-entropy of the original ids at the target positions (BERT, section 3.1; RoBERTa).

    Terms: "mlm".
    """

    def __init__(
        self,
        encoder: AnyEncoder,
        head: MaskedLanguageModelHead,
        decoder: EnhancedMaskDecoder | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.decoder = decoder

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        return {"mlm": batch.target_ids.numel()}

    def forward(self, batch: Batch) -> LossSums:
        """Sums for this batch; metrics: "mlm_correct"."""
        sums = self.predict(batch)
        term = Term("mlm", sums.loss_sum, batch.target_ids.numel())
        return LossSums((term,), {"mlm_correct": sums.correct})

    def predict(self, batch: Batch, temperature: float | None = None) -> CrossEntropySums:
        """The head's sums over the targets; with a temperature, also an id drawn for each."""
        sums: CrossEntropySums = self.head(*self._predicted(batch), batch.target_ids, temperature)
        return sums

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids at the target positions."""
        hidden, positions_M = self._predicted(batch)
        return self.head.logits(hidden.index_select(0, positions_M))

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states and which of them are predicted from: the encoder's, or, of DeBERTa, those of targets only."""
        if self.decoder is not None:
            targets_MH: Tensor = self.decoder(self.encoder, batch)
        elif isinstance(self.encoder, DisentangledEncoder):
            targets_MH = self.encoder.at(batch.target_positions, batch)
        else:
            return self.encoder(batch), batch.target_positions
        return targets_MH, torch.arange(len(targets_MH), device=targets_MH.device)


def masked_language_model(
    config: ModelConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> MaskedLanguageModel:
    """Encoder and head of any family on the current default device; weights not yet initialised
    (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    encoder = build_encoder(config, checkpoint_activations=checkpoint_activations, attend=attend)
    return MaskedLanguageModel(encoder, tied_head(config, encoder.embeddings.word), mask_decoder(config))


def tied_head(config: ModelConfig, word: nn.Embedding) -> MaskedLanguageModelHead:
    """The family's head, its decoder tied to these word embeddings, or of their size with weights of its own."""
    return MaskedLanguageModelHead(
        config.hidden,
        word,
        activation=config.head_activation,
        eps=config.layer_norm_eps,
        bias=config.biases,
        output_scale=config.output_scale,
        bare=config.bare_head,
        tied=config.tied,
    )


def mask_decoder(config: ModelConfig) -> EnhancedMaskDecoder | None:
    """DeBERTa's, if the configuration has it."""
    if isinstance(config, DebertaConfig | DebertaV2Config) and config.mask_decoder == "enhanced":
        return EnhancedMaskDecoder(config.max_length, config.hidden)
    return None
