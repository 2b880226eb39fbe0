"""Condenser: a head of a few layers predicts masked tokens from an early layer's states and a row's vector.

The vector is the last layer's state of the row's first token. Of all other tokens, the head reads an early layer's
states. So later layers' knowledge of the text can reach it only through the vector, which learns to represent the text
(Gao and Callan 2021, arXiv 2104.08253, section 3.2). The head's states predict mlm's targets through mlm's own head;
mlm itself predicts them from the last layer's states, as usual. The condenser head is not exported. With `contrastive`
this is coCondenser's pretraining (arXiv 2108.05540), except that the two texts of an example are the same row, not two
spans of a text.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.config import encoder_layers
from encoder_core.layers.sizes import layer_weight_count
from encoder_core.objectives.term import (
    BottleneckConfig,
    HeadTerm,
    Refusal,
    SharedParts,
    SmallObjective,
    TermSetting,
    TermSums,
)

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class CondenserConfig(BottleneckConfig):
    """Masked tokens, predicted by a few extra layers from an early layer's states and the first token's last state.

    Attributes:
        early: number of the layer whose output the head reads; 0: the embeddings. None: half of the model's layers, as
            in the paper (6 of 12).
        layers: number of layers of the head (paper: 2).
    """

    name = "condenser"
    reads = "layers"

    early: int | None = Field(default=None, ge=0)
    layers: PositiveInt = 2

    def early_layer(self, layers: int) -> int:
        """Return the number of the early layer in a model with `layers` layers."""
        return layers // 2 if self.early is None else self.early

    def weight_count(self, model: ModelConfig) -> int:
        return self.layers * layer_weight_count(model.hidden, model.feed_forward)

    def shrink(self, form: SmallObjective) -> "CondenserConfig":
        """Return the term for a model with fewer layers; it reads the middle layer."""
        return self.model_copy(update={"early": None})

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse what `BottleneckConfig` refuses, and an early layer that is not before the model's last layer."""
        yield from super().refusals(setting)
        layers = setting.model.layers
        if self.early is not None and self.early >= layers:
            yield Refusal(
                ("objective", self.name, "early"),
                f"early is {self.early}, but the model has {layers} layers, and the head must read the states of a "
                "layer before the last one",
                f"set it to a number from 0 (the embeddings) to {layers - 1}, or to null for {layers // 2}",
            )

    def build(self, shared: SharedParts) -> "Condenser":
        return Condenser(self, shared)


class Condenser(HeadTerm):
    """Cross-entropy of the original ids at the targets, predicted from the condenser head's states; metric "correct".

    The head's layers are post-LayerNorm, whatever the encoder's layers are.
    """

    def __init__(self, config: CondenserConfig, shared: SharedParts) -> None:
        from torch import nn

        self._early = config.early_layer(shared.model.layers)
        self._layers = nn.ModuleList(encoder_layers(shared.model, config.layers))
        self.head = shared.head()
        super().__init__(config, {"head": self.head, "condenser": self._layers})

    def target_count(self, batch: "Batch") -> int:
        return batch.target_ids.numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        from encoder_core.layers.rows import Rows

        first_R = batch.cu_seqlens[:-1].long()
        late_RH = states.layers[-1].index_select(0, first_R)
        state_TH = states.layers[self._early].index_copy(0, first_R, late_RH)
        rows = Rows.from_batch(batch)
        for layer in self._layers:
            state_TH = layer(state_TH, rows)
        found = self.head(state_TH, batch.target_positions, batch.target_ids)
        return TermSums(found.loss_sum, self.target_count(batch), {"correct": found.correct})
