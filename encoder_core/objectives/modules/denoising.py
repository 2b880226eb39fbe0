"""Denoising (Lewis et al. 2019, BART, section 2.2): an encoder reads corrupted rows, and a decoder writes the rows."""

from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import TrainingError
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.layers.cross_attention import Decoder
from encoder_core.layers.encoder import Encoder
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule, Term


class DenoisingModel(ObjectiveModule):
    """Cross-entropy of the rows' tokens, each predicted from those before it and from the row's corrupted form.

    Terms: "denoise".
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, head: MaskedLanguageModelHead, weight: float = 1.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.head = head
        self.weight = weight

    def target_counts(self, batch: Batch) -> dict[str, int]:
        return {"denoise": batch.target_ids.numel()}

    def forward(self, batch: Batch) -> LossSums:
        """Return the sums for this batch; metrics: "denoise_correct".

        Raises:
            TrainingError: the rows have no corrupted forms.
        """
        found = self.head(self.states(batch), batch.target_positions, batch.target_ids)
        term = Term("denoise", found.loss_sum, batch.target_ids.numel(), self.weight)
        return LossSums((term,), {"denoise_correct": found.correct})

    def states(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the decoder's last states, of which each predicts the token at its place. Raises as `forward`."""
        read = _encoder_batch(batch)
        written_TH: Tensor = self.decoder(batch, self.encoder(read), read)
        return written_TH

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Return scores of all ids at the target positions."""
        return self.head.logits(self.states(batch).index_select(0, batch.target_positions))


def _encoder_batch(batch: Batch) -> Batch:
    """Return the rows that the encoder reads. A batch without rows, as an idle rank has, is its own."""
    if batch.corrupted is None and batch.rows:
        raise TrainingError(
            "a batch without corrupted rows cannot train a denoising autoencoder",
            remedy="set objective.denoise in the recipe, with which the data service corrupts rows",
        )
    return batch if batch.corrupted is None else batch.corrupted
