"""Masked language modelling: predicts the original ids at the target positions."""

import torch
from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.mlm import MlmConfig


class MaskedTokens(HeadTerm, of=MlmConfig):
    """Cross-entropy of the original ids at the target positions; metric "correct". Causal rows have no targets.

    It draws an id for each target if a temperature is set (`States.temperature`).
    """

    def __init__(self, config: MlmConfig, shared: Shared) -> None:
        self.head = shared.head()
        super().__init__(config, {"head": self.head})

    def targets(self, batch: Batch) -> int:
        return 0 if batch.causal else batch.target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        if batch.causal:
            return self._empty_sums(states, batch)
        hidden_MH = states.target_states
        at_M = torch.arange(len(hidden_MH), device=hidden_MH.device)
        keys_M = None if states.temperature is None else batch.keys.index_select(0, batch.target_positions)
        found = self.head(hidden_MH, at_M, batch.target_ids, states.temperature, keys_M)
        return TermSums(found.loss_sum, self.targets(batch), {"correct": found.correct}, found.sampled)

    def _empty_sums(self, states: States, batch: Batch) -> TermSums:
        found = self.head(states.all_states[:0], batch.target_positions[:0], batch.target_ids[:0])
        return TermSums(found.loss_sum, 0, {"correct": found.correct})


def tied_head(config: ModelConfig, word: nn.Embedding) -> MaskedLanguageModelHead:
    """Return the family's head with a decoder tied to these word embeddings, or of their size with its own weights."""
    return MaskedLanguageModelHead(
        config.hidden,
        word,
        activation=config.head_activation,
        eps=config.layer_norm_eps,
        bias=config.biases,
        output_scale=config.output_scale,
        bare=config.decoder_only_head,
        inner=config.head_inner,
        decoder_bias=config.decoder_bias,
        tied=config.tied,
    )
