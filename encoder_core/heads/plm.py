"""XLNet's prediction: scores of all ids straight from a state. Shapes: M targets, H hidden, V vocabulary."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.heads.cross_entropy import CrossEntropySums, linear_cross_entropy


class PermutationHead(nn.Module):
    """A decoder tied to the word embeddings, with a bias of its own. Runs on zero rows too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.decoder = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
        self.decoder.weight = embedding.weight

    def logits(self, query_MH: Float[Tensor, "targets hidden"]) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids; training never holds them at once."""
        logits_MV: Tensor = self.decoder(query_MH)
        return logits_MV

    def forward(
        self, query_MH: Float[Tensor, "targets hidden"], ids_M: Int[Tensor, " targets"]
    ) -> CrossEntropySums:
        """Sums over the targets of the cross-entropy and of correct predictions."""
        return linear_cross_entropy(query_MH, self.decoder.weight, self.decoder.bias, ids_M)
