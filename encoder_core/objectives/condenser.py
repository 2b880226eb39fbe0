"""Condenser: a head of few layers predicts hidden tokens from early states and the vector of the row.

The head reads the states of an early layer for all tokens but the row's first, and the last layer's for that one. What
later layers know of the whole text can reach it only through the first token, whose last state becomes a vector of the
text (Gao and Callan 2021, arXiv 2104.08253, section 3.2). It predicts the targets of mlm, by the head of mlm, and mlm
itself still predicts them from the last layer's states. The head is not exported. With `contrastive` beside it this is
what coCondenser pretrains with (2108.05540), but that its examples are rows read twice and not two spans of a text.
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

if TYPE_CHECKING:  # torch is imported only where tensors are computed: reading a recipe needs none
    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class CondenserConfig(BottleneckConfig):
    """Hidden tokens, predicted by a few layers from early states of all tokens and the last state of the first one.

    Attributes:
        early: number of the layer whose states the head reads; 0 the embeddings. None: half of the model's layers, as
            in the paper (6 of 12).
        layers: number of layers of the head (paper: 2).
    """

    name = "condenser"
    reads = "layers"

    early: int | None = Field(default=None, ge=0)
    layers: PositiveInt = 2

    def early_layer(self, layers: int) -> int:
        """Return `early` of a model with so many layers."""
        return layers // 2 if self.early is None else self.early

    def weight_count(self, model: ModelConfig) -> int:
        return self.layers * layer_weight_count(model.hidden, model.feed_forward)

    def shrink(self, form: SmallObjective) -> "CondenserConfig":
        """Return the term for a model of fewer layers: it reads the middle one."""
        return self.model_copy(update={"early": None})

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse also an early layer that is none of the model's, or its last."""
        yield from super().refusals(setting)
        layers = setting.model.layers
        if self.early is not None and self.early >= layers:
            yield Refusal(
                ("objective", self.name, "early"),
                f"the head reads the states of layer {self.early}, but the model has {layers} layers, and the last "
                "one's states would show it what the vector is to hold",
                f"give 0 (the embeddings) to {layers - 1}, or null for {layers // 2}",
            )

    def build(self, shared: SharedParts) -> "Condenser":
        return Condenser(self, shared)


class Condenser(HeadTerm):
    """Cross-entropy of the original ids at the targets, by the head's states; metric "correct".

    The layers of the head have LayerNorms after their blocks, whatever those of the encoder are.
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
