"""The device half of a made-up objective, as a newcomer writes it: which token stood at a place before tokens moved.

`tests/architecture/test_habit_of_an_objective.py` copies it to encoder_core/objectives/.
"""

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
from encoder_core.objectives.mlm import tied_head
from encoder_core.objectives.term import HeadTerm, States, TermSums
from encoder_core.terms.term import HeadConfig, Refusal, Setting


class ShuffledConfig(HeadConfig):
    """Tokens that changed places, from the states where they stood."""

    name = "shuffled"
    exported = "mlm"
    reads = "targets"

    def device(self, model: ModelConfig, word: nn.Embedding) -> "ShuffledTokens":
        return ShuffledTokens(self, tied_head(model, word))

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Not XLNet; not beside mlm, which chooses targets too; not where texts are compared."""
        if isinstance(setting.model, XlnetConfig):
            yield Refusal(("objective",), "xlnet reads rows in a drawn order", "choose another family")
        elif "mlm" in setting.terms:
            yield Refusal(("objective",), "shuffled and mlm each choose the targets", "keep one of them")
        elif setting.rows is not None and (setting.rows.texts or setting.rows.lanes):
            yield Refusal(
                ("input", "packing"), "shuffled needs running text", "set input.packing to full_sentences"
            )

    def products(self, states: CountedStates) -> Iterator[Product]:
        yield from states.at_targets()
        yield from head(states.model, states.shape.targets)

    def keeps(self, states: CountedStates) -> Activations:
        outside = kept_by_head(states.model, states.shape.targets)
        return Activations(tuple(outside), ()) + states.at_targets_keeps()

    def scored(self, shape: Shape) -> int:
        return shape.targets


class ShuffledTokens(HeadTerm):
    """Cross-entropy of the original ids; metrics "correct" and "moved", whether another token stands there now."""

    def __init__(self, config: ShuffledConfig, head: MaskedLanguageModelHead) -> None:
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
