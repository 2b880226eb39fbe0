"""Condenser: a head of few layers predicts hidden tokens from early states and the vector of the row.

The head reads the states of an early layer for all tokens but the row's first, and the last layer's for that one. What
later layers know of the whole text can reach it only through the first token, whose last state becomes a vector of the
text (Gao and Callan 2021, arXiv 2104.08253, section 3.2). It predicts the targets of mlm, by the head of mlm, and mlm
itself still predicts them from the last layer's states. The head is not exported. With `contrastive` beside it this is
what coCondenser pretrains with (2108.05540), but that its examples are rows read twice and not two spans of a text.
"""

from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.config import encoder_layers
from encoder_core.layers.rows import Rows
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.condenser import CondenserConfig


class Condenser(HeadTerm, of=CondenserConfig):
    """Cross-entropy of the original ids at the targets, by the head's states; metric "correct".

    The layers of the head have LayerNorms after their blocks, whatever those of the encoder are.
    """

    def __init__(self, config: CondenserConfig, shared: Shared) -> None:
        self._early = config.early_layer(shared.model.layers)
        self._layers = nn.ModuleList(encoder_layers(shared.model, config.layers, lambda: None))
        self.head = shared.head()
        super().__init__(config, {"head": self.head, "condenser": self._layers})

    def targets(self, batch: Batch) -> int:
        return batch.target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        first_R = batch.cu_seqlens[:-1].long()
        late_RH = states.layers[-1].index_select(0, first_R)
        state_TH = states.layers[self._early].index_copy(0, first_R, late_RH)
        rows = Rows.from_batch(batch)
        for layer in self._layers:
            state_TH = layer(state_TH, rows)
        found = self.head(state_TH, batch.target_positions, batch.target_ids)
        return TermSums(found.loss_sum, self.targets(batch), {"correct": found.correct})
