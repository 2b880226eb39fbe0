"""Masked language modelling and a sentence-pair task on one encoder: BERT (next sentence), ALBERT (order).

With DeBERTa's enhanced mask decoder too: masked tokens are predicted by it, pairs from the last layer.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.build import AnyEncoder, ModelConfig, build_encoder
from encoder_core.heads.classification import PairHead
from encoder_core.heads.prediction import EnhancedMaskDecoder, MaskedLanguageModelHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.objectives.losses import LossSums, ObjectiveModule, Term
from encoder_core.objectives.mlm import mask_decoder, tied_head

PairTask = Literal["nsp", "sop"]
"""Next sentence prediction (BERT, section 3.1) or sentence order prediction (ALBERT, section 3.1)."""


class MaskedLanguageModelWithPairs(ObjectiveModule):
    """Two terms: "mlm" over targets, and "nsp" or "sop" over rows, times `weight`.

    Rows without labels (`pair_labels` None) have no pair term, but its head still takes part in the graph.
    """

    def __init__(
        self,
        encoder: AnyEncoder,
        head: MaskedLanguageModelHead,
        pair_head: PairHead,
        task: PairTask,
        weight: float = 1.0,
        decoder: EnhancedMaskDecoder | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.pair_head = pair_head
        self.task: PairTask = task
        self.weight = weight
        self.decoder = decoder

    def target_counts(self, batch: Batch) -> dict[str, int]:
        """How many summands each term will have for this batch, known before the forward pass."""
        rows = 0 if batch.pair_labels is None else batch.pair_labels.numel()
        return {"mlm": batch.target_ids.numel(), self.task: rows}

    def forward(self, batch: Batch) -> LossSums:
        """Sums for this batch; metrics: "mlm_correct", and "nsp_correct" or "sop_correct"."""
        counts = self.target_counts(batch)
        labels_R = batch.cu_seqlens[:0].long() if batch.pair_labels is None else batch.pair_labels
        targets_MH, first_RH = self._predicted(batch, rows=counts[self.task])
        at_M = torch.arange(len(targets_MH), device=targets_MH.device)
        loss_sum, correct, _ = self.head(targets_MH, at_M, batch.target_ids)
        pair_sum, pair_correct = self.pair_head(first_RH, labels_R)
        terms = (
            Term("mlm", loss_sum, counts["mlm"]),
            Term(self.task, pair_sum, counts[self.task], self.weight),
        )
        return LossSums(terms, {"mlm_correct": correct, f"{self.task}_correct": pair_correct})

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids at the target positions."""
        return self.head.logits(self._predicted(batch, rows=0)[0])

    def _predicted(self, batch: Batch, *, rows: int) -> tuple[Tensor, Tensor]:
        """Hidden states at the targets, and at the first tokens of the first `rows` rows."""
        first_R = batch.cu_seqlens[:rows].long()
        if self.decoder is None:
            hidden_TH = self.encoder(batch)
            return hidden_TH.index_select(0, batch.target_positions), hidden_TH.index_select(0, first_R)
        assert isinstance(self.encoder, DisentangledEncoder)  # only this family has the decoder
        x_TH = self.encoder.before_last(batch)
        first_RH = self.encoder.look_again(x_TH.index_select(0, first_R), first_R, x_TH, batch, 1)
        return self.decoder.decode(self.encoder, x_TH, batch), first_RH


def masked_language_model_with_pairs(
    config: ModelConfig,
    task: PairTask,
    weight: float = 1.0,
    *,
    checkpoint_activations: bool = False,
    attend: Attend = automatic,
) -> MaskedLanguageModelWithPairs:
    """Encoder and both heads, on the default device; weights not yet initialised (`initialise`).

    Raises ModelError if the configuration's vocabulary is unknown.
    """
    encoder = build_encoder(config, checkpoint_activations=checkpoint_activations, attend=attend)
    head = tied_head(config, encoder.embeddings.word)
    return MaskedLanguageModelWithPairs(
        encoder, head, PairHead(config.hidden), task, weight, mask_decoder(config)
    )
