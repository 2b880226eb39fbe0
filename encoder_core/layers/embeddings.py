"""What a token looks like before the first layer. Shapes: T tokens, E embedding width."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.dropout import Dropout


class DifferenceEmbedding(nn.Embedding):
    """A table as its difference from another one that it leaves alone: stop_gradient(base) + weight.

    Gradient-disentangled embedding sharing (DeBERTaV3: He et al. 2021, section 3.2). `weight` begins at zero.
    """

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim)
        self.base = base

    def forward(self, ids_T: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        base_TE: Tensor = self.base(ids_T)
        return base_TE.detach() + super().forward(ids_T)


class Embeddings(nn.Module):
    """Sum of word, position and (where the model has them) token-type embeddings, LayerNorm, dropout.

    `first_position` is the row of the position table that belongs to the first token: 0 for BERT, the padding
    id + 1 for RoBERTa, whose table keeps the unused rows before it so that weights travel unchanged.
    `positions` 0 leaves the position table out (models with relative positions only). `padding` is the row of the word
    and position tables that is fresh at zero, None for no such row.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        positions: int,
        first_position: int = 0,
        token_types: int = 0,
        padding: int | None = None,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.first_position = first_position
        self.word = nn.Embedding(vocab, width, padding_idx=padding)
        self.position = nn.Embedding(positions, width, padding_idx=padding) if positions else None
        self.token_type = nn.Embedding(token_types, width) if token_types else None
        self.norm = nn.LayerNorm(width, eps=eps)
        self.dropout = Dropout(dropout)

    def disentangle_from(self, other: "Embeddings") -> None:
        """Make every table the difference from the same table of `other`; the LayerNorm stays this one's own."""
        self.word = DifferenceEmbedding(other.word)
        if other.position is not None:
            self.position = DifferenceEmbedding(other.position)
        if other.token_type is not None:
            self.token_type = DifferenceEmbedding(other.token_type)

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
