"""The post-LayerNorm Transformer encoder of BERT and its relatives.

Shapes: T tokens, E embedding width, H hidden.
"""

from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from encoder_core.batch import Batch
from encoder_core.layers.attention import SelfAttention
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.embeddings import Embeddings
from encoder_core.layers.feed_forward import FeedForward
from encoder_core.layers.rows import Rows


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, residual sum and LayerNorm (BERT, section 3)."""

    def __init__(
        self, attention: SelfAttention, feed_forward: FeedForward, hidden: int, *, eps: float, dropout: float
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = nn.LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(self, x_TH: Float[Tensor, "tokens hidden"], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        x_TH = self.attention_norm(x_TH + self.dropout(self.attention(x_TH, rows)))
        y_TH: Tensor = self.feed_forward_norm(x_TH + self.dropout(self.feed_forward(x_TH)))
        return y_TH


class Encoder(nn.Module):
    """Embeddings, a projection to the hidden width where the two differ, and layers.

    `schedule` names the layer to run at each depth: (0, 1, 2, ...) without sharing, (0, 0, 0, ...) with one
    layer's parameters everywhere. With `checkpoint_activations` each depth keeps only its input and runs
    again in the backward pass, with the same dropout.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        layers: Sequence[EncoderLayer],
        *,
        schedule: Sequence[int] | None = None,
        projection: nn.Linear | None = None,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.projection = projection
        self.layers = nn.ModuleList(layers)
        self.schedule = tuple(schedule) if schedule is not None else tuple(range(len(layers)))
        self.checkpoint_activations = checkpoint_activations

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """The last layer's output."""
        for hidden_TH in self.states(batch):
            last_TH = hidden_TH
        return last_TH

    def states(self, batch: Batch) -> Iterator[Float[Tensor, "tokens hidden"]]:
        """The hidden states from the embeddings (projected) to the last layer, depth + 1 of them."""
        x_TH: Tensor = self.embeddings(batch)
        if self.projection is not None:
            x_TH = self.projection(x_TH)
        yield x_TH
        rows = Rows.of(batch)
        for index in self.schedule:
            x_TH = self._layer(index, x_TH, rows)
            yield x_TH

    def _layer(self, index: int, x_TH: Tensor, rows: Rows) -> Tensor:
        if self.checkpoint_activations and self.training:
            y_TH: Tensor = checkpoint(self.layers[index], x_TH, rows, use_reentrant=False)
        else:
            y_TH = self.layers[index](x_TH, rows)
        return y_TH
