"""RetroMAE: a shallow decoder predicts a row's whole text from the vector of its first token.

The encoder reads the text with mlm's masks (paper: 15 to 30 %), and the last state of its first token is the vector.
The decoder (`heads/shallow_decoder.py`) is too weak to reconstruct the text from the few words that it sees, so the
vector must represent the text (Xiao et al. 2022, arXiv 2205.12035, section 3). The decoder predicts with mlm's head,
and is not exported.
"""

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import layer_weight_count, linear_weight_count, norm_weight_count
from encoder_core.objectives.term import BottleneckConfig, HeadTerm, SharedParts, TermSums

if TYPE_CHECKING:  # torch is imported only where tensors are computed, not to read a recipe
    from jaxtyping import Int
    from torch import Tensor

    from encoder_core.batch import Batch
    from encoder_core.objectives.modules.states import States


class RetromaeConfig(BottleneckConfig):
    """A row's whole text, predicted by a one-layer decoder from the first token's last state and a few of its words.

    Attributes:
        rate: probability with which a token is hidden from a query of the decoder, independently for each query (paper:
            0.5 to 0.7).
    """

    name = "retromae"
    reads = "first"

    rate: float = Field(default=0.5, gt=0, lt=1)

    def weight_count(self, model: ModelConfig) -> int:
        hidden, width = model.hidden, model.embedding_width
        projection = linear_weight_count(width, hidden) if width != hidden else 0
        tables = model.max_length * hidden + norm_weight_count(hidden)
        return tables + projection + layer_weight_count(hidden, model.feed_forward)

    def build(self, shared: SharedParts) -> "Reconstruction":
        return Reconstruction(self, shared)


class Reconstruction(HeadTerm):
    """Cross-entropy of the ids of all tokens except each row's first, masked by mlm or not; metric "correct".

    Tokens that `Batch.kept` leaves out are not predicted.
    """

    def __init__(self, config: RetromaeConfig, shared: SharedParts) -> None:
        from encoder_core.heads.shallow_decoder import ShallowDecoder

        model = shared.model
        self.decoder = ShallowDecoder(
            model.max_length,
            model.embedding_width,
            model.hidden,
            heads=model.heads,
            inner=model.feed_forward,
            activation=model.activation,
            eps=model.layer_norm_eps,
            dropout=model.dropout,
            attention_dropout=model.attention_dropout,
        )
        self.head = shared.head()
        super().__init__(config, {"head": self.head, "shallow_decoder": self.decoder})
        self._word, self._rate = shared.word, config.rate

    def target_count(self, batch: "Batch") -> int:
        return _predicted_positions(batch).numel()

    def sums(self, states: "States", batch: "Batch") -> TermSums:
        from encoder_core.batch import copy_to_device

        vectors_RH = states.states_at(batch.cu_seqlens[:-1].long(), max_per_row=1)
        text_T = batch.unmasked_tokens
        state_TH = self.decoder(vectors_RH, self._word(text_T), batch, self._rate)
        at_M = copy_to_device(_predicted_positions(batch), batch.tokens.device)
        found = self.head(state_TH, at_M, text_T.index_select(0, at_M))
        return TermSums(found.loss_sum, len(at_M), {"correct": found.correct})


def _predicted_positions(batch: "Batch") -> 'Int[Tensor, " targets"]':
    """Return the flat positions of the predicted tokens, on the host, so that nothing waits for the device."""
    import torch

    host = batch.on_host
    at_K = np.arange(host.tokens.numel()) if host.kept is None else host.kept.numpy()
    return torch.from_numpy(at_K[host.positions.numpy()[at_K] > 0])
