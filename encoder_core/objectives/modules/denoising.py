"""Denoising (BART: Lewis et al. 2019, section 2.2): a decoder predicts rows whose corrupted form an encoder reads."""

from jaxtyping import Float
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import TrainingError
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.layers.cross_attention import Decoder
from encoder_core.layers.encoder import Encoder
from encoder_core.objectives.modules.losses import LossSums, ObjectiveModule, Term


class DenoisingModel(ObjectiveModule):
    """Cross-entropy of the rows' tokens, each predicted from the tokens before it and the row's corrupted form.

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
        """Return the decoder's last states; the state at each token predicts that token. Raises as `forward`."""
        read = _encoder_batch(batch)
        written_TH: Tensor = self.decoder(batch, self.encoder(read), read)
        return written_TH

    def logits(self, batch: Batch) -> Float[Tensor, "targets vocab"]:
        """Return the logits of all ids at the target positions."""
        return self.head.logits(self.states(batch).index_select(0, batch.target_positions))


def _encoder_batch(batch: Batch) -> Batch:
    """Return the rows that the encoder reads: the corrupted rows, or an idle rank's batch itself, which has no rows."""
    if batch.corrupted is None and batch.rows:
        raise TrainingError(
            "a batch without corrupted rows cannot train a denoising autoencoder",
            remedy="set objective.denoise in the recipe, so that the data service corrupts rows",
        )
    return batch if batch.corrupted is None else batch.corrupted
