"""RetroMAE: a shallow decoder predicts a row's whole text from the vector of its first token.

The encoder reads the text with masks, as mlm makes them (paper: 15 to 30 %), and its first token's last state is the
vector. The decoder (`heads/shallow_decoder.py`) is too weak to tell the text from the few words that it sees, so the
vector must hold the text (Xiao et al. 2022, arXiv 2205.12035, section 3). It predicts by mlm's head, and is not
exported.
"""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from encoder_core.batch import Batch, send
from encoder_core.heads.shallow_decoder import ShallowDecoder
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.retromae import RetromaeConfig


class Reconstruction(HeadTerm, of=RetromaeConfig):
    """Cross-entropy of the ids of all tokens but the first of each row, whether or not mlm hides them.

    The metric is "correct". Tokens that `Batch.kept` leaves out are not predicted.
    """

    def __init__(self, config: RetromaeConfig, shared: Shared) -> None:
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

    def targets(self, batch: Batch) -> int:
        return _predicted_positions(batch).numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        vectors_RH = states.at(batch.cu_seqlens[:-1].long(), most=1)
        text_T = batch.text
        state_TH = self.decoder(vectors_RH, self._word(text_T), batch, self._rate)
        at_M = send(_predicted_positions(batch), batch.tokens.device)
        found = self.head(state_TH, at_M, text_T.index_select(0, at_M))
        return TermSums(found.loss_sum, len(at_M), {"correct": found.correct})


def _predicted_positions(batch: Batch) -> Int[Tensor, " targets"]:
    """Return the flat positions that are predicted, in the host's memory: nothing waits for the device."""
    host = batch.on_host
    at_K = np.arange(host.tokens.numel()) if host.kept is None else host.kept.numpy()
    return torch.from_numpy(at_K[host.positions.numpy()[at_K] > 0])
