"""What a token looks like before the first layer. Shapes: T tokens, E embedding width."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch


class Embeddings(nn.Module):
    """Sum of word, position and (where the model has them) token-type embeddings, LayerNorm, dropout.

    `first_position` is the row of the position table that belongs to the first token: 0 for BERT, the padding
    id + 1 for RoBERTa, whose table keeps the unused rows before it so that weights travel unchanged.
    `positions` 0 leaves the position table out (models with relative positions only).
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        positions: int,
        first_position: int = 0,
        token_types: int = 0,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.first_position = first_position
        self.word = nn.Embedding(vocab, width)
        self.position = nn.Embedding(positions, width) if positions else None
        self.token_type = nn.Embedding(token_types, width) if token_types else None
        self.norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens width"]:
        """A batch without `segments` is all first segment."""
        x_TE = self.word(batch.tokens)
        if self.token_type is not None:
            segments = batch.segments if batch.segments is not None else torch.zeros_like(batch.tokens)
            x_TE = x_TE + self.token_type(segments)
        if self.position is not None:
            x_TE = x_TE + self.position(batch.positions + self.first_position)
        embedded_TE: Tensor = self.dropout(self.norm(x_TE))
        return embedded_TE
