"""DeBERTa's enhanced mask decoder (He et al. 2021, section 3.2): absolute positions enter just before the softmax.

Shapes: T tokens, M targets, H hidden.
"""

from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.deberta_encoder import DisentangledEncoder

PASSES = 2  # microsoft/DeBERTa, masked_language_model.py


class EnhancedMaskDecoder(nn.Module):
    """The encoder's last layer, run twice with queries that know where they stand.

    The first query is the state before the last layer plus an absolute position, the second the first's outcome;
    keys and values are the states before the last layer both times. The ordinary last layer is not needed, and only
    targets are queries: the layer runs over 15 % of the tokens twice instead of over all of them three times.
    """

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.position = nn.Embedding(positions, hidden)

    def forward(self, encoder: DisentangledEncoder, batch: Batch) -> Float[Tensor, "targets hidden"]:
        """States at `batch.target_positions`; M may be 0."""
        return self.decode(encoder, encoder.before_last(batch), batch)

    def decode(
        self, encoder: DisentangledEncoder, x_TH: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> Float[Tensor, "targets hidden"]:
        """The same from `before_last`'s states, where another task needs those too."""
        at_M = batch.target_positions
        queries_MH = x_TH.index_select(0, at_M) + self.position(batch.positions[at_M])
        return encoder.look_again(queries_MH, at_M, x_TH, batch, PASSES)
