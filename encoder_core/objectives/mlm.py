"""Masked language modelling: predicts the original ids at the target positions."""

from collections.abc import Iterator

import torch
from torch import nn

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations, kept_by_head
from encoder_core.cost.flops import head
from encoder_core.cost.products import Product, Shape
from encoder_core.cost.states import CountedStates
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.layers.attention import Attend, automatic
from encoder_core.objectives.multitask import MultitaskModel, multitask_model
from encoder_core.objectives.term import (
    HeadConfig,
    HeadTerm,
    LateWeight,
    Refusal,
    Setting,
    States,
    TermSums,
)


class MlmConfig(LateWeight, HeadConfig):
    """Masked language modelling (BERT, section 3.1). Which tokens are masked is a setting of the data service."""

    name = "mlm"
    exported = "mlm"
    reads = "targets"

    def device(self, model: ModelConfig, word: nn.Embedding) -> "MaskedTokens":
        return MaskedTokens(self, tied_head(model, word))

    def products(self, states: CountedStates) -> Iterator[Product]:
        yield from states.at_targets()
        yield from head(states.model, states.shape.targets)

    def keeps(self, states: CountedStates) -> Activations:
        outside = kept_by_head(states.model, states.shape.targets)
        return Activations(tuple(outside), ()) + states.at_targets_keeps()

    def scored(self, shape: Shape) -> int:
        return shape.targets

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Refuse XLNet, and rows without masks."""
        rows = setting.rows
        if isinstance(setting.model, XlnetConfig):
            yield Refusal(
                ("objective",),
                "a model of family xlnet is not trained by mlm: it predicts tokens in a random order, without masks",
                "use plm for xlnet, and mlm for every other family",
            )
        elif rows is not None and rows.lanes:
            yield Refusal(
                ("input", "packing"),
                "rows in lanes are for permuted language modelling, but the objective is another",
                "set objective to plm, or input.packing to full_sentences",
            )
        elif rows is not None and rows.texts:
            yield Refusal(
                ("input", "packing"),
                f"{rows.packing} rows hold whole texts to be compared, but the objective predicts tokens",
                "set objective to contrastive, or input.packing to full_sentences",
            )


class MaskedTokens(HeadTerm):
    """Cross-entropy of the original ids at the target positions; metric "correct".

    It draws an id for each target if a temperature is set (`States.temperature`).
    """

    def __init__(self, config: MlmConfig, head: MaskedLanguageModelHead) -> None:
        super().__init__(config, {"head": head})
        self.head = head

    def targets(self, batch: Batch) -> int:
        return batch.target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        hidden_MH = states.at_targets
        at_M = torch.arange(len(hidden_MH), device=hidden_MH.device)
        keys_M = None if states.temperature is None else batch.keys.index_select(0, batch.target_positions)
        found = self.head(hidden_MH, at_M, batch.target_ids, states.temperature, keys_M)
        return TermSums(found.loss_sum, self.targets(batch), {"correct": found.correct}, found.sampled)


def masked_language_model(
    config: ModelConfig, *, checkpoint_activations: bool = False, attend: Attend = automatic
) -> MultitaskModel:
    """Build a network of any family with this term alone; see `multitask_model`."""
    return multitask_model(
        config, [MlmConfig()], checkpoint_activations=checkpoint_activations, attend=attend
    )


def tied_head(config: ModelConfig, word: nn.Embedding) -> MaskedLanguageModelHead:
    """Return the family's head with a decoder tied to these word embeddings, or of their size with its own weights."""
    return MaskedLanguageModelHead(
        config.hidden,
        word,
        activation=config.head_activation,
        eps=config.layer_norm_eps,
        bias=config.biases,
        output_scale=config.output_scale,
        bare=config.bare_head,
        decoder_bias=config.decoder_bias,
        tied=config.tied,
    )
