"""Masked language modelling (BERT, section 3.1): predicts the original ids at the target positions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from encoder_core.objectives.term import (
    HeadConfig,
    HeadTerm,
    OmittedWeightTerm,
    Refusal,
    SharedParts,
    TermSetting,
    TermSums,
    family_refusal,
    refuse_decoder_family,
)

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class TokenPrediction(HeadConfig):
    """A term that predicts the original ids of masked tokens, with the masked-language-model head."""

    exported = "mlm"
    reads = "targets"
    predicts_ids = True

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse XLNet (it has no masks), encoder-decoder families, and rows that are not masked."""
        rows = setting.rows
        yield from refuse_decoder_family(self.name, setting)
        if setting.model.permutes:
            why = "it predicts tokens in a random order, without masks"
            remedy = f"use plm for {setting.model.family}, and {self.name} for encoder-only families"
            yield family_refusal(self.name, setting, why, remedy)
        elif rows is not None and rows.lanes:
            yield Refusal(
                ("input", "packing"),
                "rows in lanes are for permuted language modelling (plm), but the objective is another",
                "use objective.plm only, or set input.packing to full_sentences",
            )
        elif rows is not None and rows.texts:
            yield Refusal(
                ("input", "packing"),
                f"{rows.packing} rows hold whole texts to be compared, but the objective predicts masked tokens",
                "use objective.contrastive only, or set input.packing to full_sentences",
            )


class MlmConfig(OmittedWeightTerm, TokenPrediction):
    """Masked language modelling (BERT, section 3.1). The settings of masking belong to the data service."""

    name = "mlm"

    def build(self, shared: SharedParts) -> "MaskedTokens":
        return MaskedTokens(self, shared)


class MaskedTokens(HeadTerm):
    """Cross-entropy of the original ids at the target positions; metric "correct".

    Causal rows (see `clm`) have no targets. If `States.temperature` is set, an id is also sampled for each target.
    """

    def __init__(self, config: MlmConfig, shared: SharedParts) -> None:
        self.head = shared.head()
        super().__init__(config, {"head": self.head})

    def target_count(self, batch: "Batch") -> int:
        return 0 if batch.causal else batch.target_ids.numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        import torch

        if batch.causal:
            return self._empty_sums(states, batch)
        hidden_MH = states.target_states
        at_M = torch.arange(len(hidden_MH), device=hidden_MH.device)
        keys_M = None if states.temperature is None else batch.random_keys.index_select(0, batch.target_positions)
        found = self.head(hidden_MH, at_M, batch.target_ids, states.temperature, keys_M)
        return TermSums(found.loss_sum, self.target_count(batch), {"correct": found.correct}, found.sampled)

    def _empty_sums(self, states: "States", batch: "Batch") -> TermSums:
        found = self.head(states.all_states[:0], batch.target_positions[:0], batch.target_ids[:0])
        return TermSums(found.loss_sum, 0, {"correct": found.correct})
