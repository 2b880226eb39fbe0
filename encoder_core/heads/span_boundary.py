"""SpanBERT's span-boundary head. Shapes: B targets, H hidden, P position width, V vocabulary."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.heads.cross_entropy import CrossEntropySums, linear_cross_entropy
from encoder_core.layers.encoder import Activation, activate

POSITION_WIDTH = 200
MAX_TARGETS = 15
"""Tokens of one span that are predicted from its boundary, at most (official code)."""


class SpanBoundaryHead(nn.Module):
    """[left boundary; right boundary; place in the span] through two of (Linear, GELU, LayerNorm), then a decoder
    tied to the word embeddings with a bias of its own (SpanBERT, section 3.2)."""

    def __init__(self, hidden: int, embedding: nn.Embedding, *, activation: Activation, eps: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.place = nn.Embedding(MAX_TARGETS, POSITION_WIDTH)
        self.first = nn.Linear(2 * hidden + POSITION_WIDTH, hidden)
        self.first_norm = nn.LayerNorm(hidden, eps=eps)
        self.second = nn.Linear(hidden, hidden)
        self.second_norm = nn.LayerNorm(hidden, eps=eps)
        self.decoder = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
        self.decoder.weight = embedding.weight

    def features(
        self,
        left_BH: Float[Tensor, "targets hidden"],
        right_BH: Float[Tensor, "targets hidden"],
        place_B: Int[Tensor, " targets"],
    ) -> Float[Tensor, "targets hidden"]:
        """`place_B` counts from 0, the token after the left boundary."""
        x_BH = self.first(torch.cat((left_BH, right_BH, self.place(place_B)), -1))
        x_BH = self.first_norm(activate(x_BH, self.activation))
        y_BH: Tensor = self.second_norm(activate(self.second(x_BH), self.activation))
        return y_BH

    def forward(
        self,
        left_BH: Float[Tensor, "targets hidden"],
        right_BH: Float[Tensor, "targets hidden"],
        place_B: Int[Tensor, " targets"],
        ids_B: Int[Tensor, " targets"],
    ) -> CrossEntropySums:
        """Sums over targets; B may be 0."""
        features_BH = self.features(left_BH, right_BH, place_B)
        return linear_cross_entropy(features_BH, self.decoder.weight, self.decoder.bias, ids_B)
