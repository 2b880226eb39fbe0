"""The masked-language-model head. Shapes: T tokens, M targets, H hidden, E embedding width, V vocabulary."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.heads.cross_entropy import CrossEntropySums, linear_cross_entropy
from encoder_core.layers.encoder import Activation, activate


class MaskedLanguageModelHead(nn.Module):
    """Linear, GELU, LayerNorm, then a decoder tied to the word embeddings with a bias of its own (BERT,
    section 3.1).

    Works on target positions only. With no target at all it still runs, on zero rows, so that every parameter
    takes part in the backward pass on every rank.
    """

    def __init__(self, hidden: int, embedding: nn.Embedding, *, activation: Activation, eps: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.dense = nn.Linear(hidden, embedding.embedding_dim)
        self.norm = nn.LayerNorm(embedding.embedding_dim, eps=eps)
        self.decoder = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
        self.decoder.weight = embedding.weight

    def features(self, hidden_MH: Float[Tensor, "targets hidden"]) -> Float[Tensor, "targets width"]:
        features_ME: Tensor = self.norm(activate(self.dense(hidden_MH), self.activation))
        return features_ME

    def logits(self, hidden_MH: Float[Tensor, "targets hidden"]) -> Float[Tensor, "targets vocab"]:
        """Scores of all ids, for filling masks and for comparisons; training never holds them at once."""
        logits_MV: Tensor = self.decoder(self.features(hidden_MH))
        return logits_MV

    def forward(
        self,
        hidden_TH: Float[Tensor, "tokens hidden"],
        positions_M: Int[Tensor, " targets"],
        ids_M: Int[Tensor, " targets"],
        temperature: float | None = None,
    ) -> CrossEntropySums:
        """Sums over the targets; with a temperature, also an id drawn for each (see `linear_cross_entropy`)."""
        features_ME = self.features(hidden_TH.index_select(0, positions_M))
        return linear_cross_entropy(
            features_ME, self.decoder.weight, self.decoder.bias, ids_M, temperature=temperature
        )
