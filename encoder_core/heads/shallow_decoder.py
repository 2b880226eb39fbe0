"""RetroMAE's decoder: one layer that reconstructs a text from its vector and, for each token, a few other tokens.

A query is the text's vector plus a position embedding, without a LayerNorm. The keys are the vector, and the words with
their positions (enhanced decoding: Xiao et al. 2022, section 3.3). So every token of a text is predicted in one pass,
each from other words. The layer is post-LayerNorm, as in the paper, whatever the encoder's layers are.

The paper adds "position embeddings", and its code uses the encoder's. Here the decoder has its own table, because some
families have none. It also has its own LayerNorm of words and, if embeddings are narrower than states, projection.

Each query sees different keys, which no fused kernel supports. So attention always runs on the padded rectangle with a
mask (torch's fused attention, or elementary operations), also in half precision on a GPU.

Shapes: T tokens, R rows, L longest row, E embedding width, H hidden, N heads, D head width.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.attention import attend_padded
from encoder_core.layers.dropout import Dropout, drop_threshold, keep_mask
from encoder_core.layers.encoder import FeedForward
from encoder_core.layers.residual import LayerNorm, normed_sum
from encoder_core.layers.rows import Rows
from encoder_core.layers.sizes import Activation
from encoder_core.random_draws import draw_key


class ShallowDecoder(nn.Module):
    """RetroMAE's decoder: one layer of attention and feed-forward; see the module docstring.

    Args:
        positions: number of tokens in the longest row.
        width: width of the word embeddings, which a Linear projects to `hidden` if it differs.
        inner: inner width of the feed-forward block.
        eps: epsilon of the LayerNorms.
        dropout, attention_dropout: dropout rates of states and of attention probabilities.
    """

    def __init__(
        self,
        positions: int,
        width: int,
        hidden: int,
        *,
        heads: int,
        inner: int,
        activation: Activation,
        eps: float,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.width = hidden // heads
        self.position = nn.Embedding(positions, hidden)
        self.projection = None if width == hidden else nn.Linear(width, hidden)
        self.norm = LayerNorm(hidden, eps=eps)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.attention_norm = LayerNorm(hidden, eps=eps)
        self.feed_forward = FeedForward(hidden, inner, activation)
        self.feed_forward_norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)
        self.attention_dropout = attention_dropout

    def forward(
        self,
        vectors_RH: Float[Tensor, "rows hidden"],
        words_TE: Float[Tensor, "tokens width"],
        batch: Batch,
        rate: float,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return for each token the state from which it is predicted. The state of a row's first token is not used.

        Args:
            vectors_RH: vector of each row's text.
            words_TE: word embeddings of the unmasked text.
            batch: the batch with these rows; T may be 0.
            rate: probability with which a key is hidden from a query.
        """
        rows = Rows.from_batch(batch)
        count = batch.positions.numel()
        vector_TH = vectors_RH.repeat_interleave(batch.cu_seqlens.diff(), 0, output_size=count)
        place_TH = self.position(batch.positions)
        words_TH = words_TE if self.projection is None else self.projection(words_TE)
        query_TH = vector_TH + place_TH
        text_TH = self.dropout(self.norm(words_TH + place_TH), batch.random_keys)
        key_TH = torch.where((batch.positions == 0)[:, None], vector_TH, text_TH)
        attended_TH = self.output(self._attended_values(query_TH, key_TH, rows, visible_tokens(batch, rate)))
        drop, keys_T = self.dropout, batch.random_keys
        y_TH = normed_sum(self.attention_norm, query_TH, attended_TH, drop, keys_T, drop.next_draw())
        return normed_sum(self.feed_forward_norm, y_TH, self.feed_forward(y_TH), drop, keys_T, drop.next_draw())

    def _attended_values(self, query_TH: Tensor, key_TH: Tensor, rows: Rows, visible_TL: Tensor) -> Tensor:
        """Apply attention to padded rows. Queries that are padding see the row's vector, so that results are finite."""
        q_TH, k_TH, v_TH = self.query(query_TH), self.key(key_TH), self.value(key_TH)
        q_RNLD, k_RNLD, v_RNLD = (
            rows.pad(x_TH.unflatten(-1, (-1, self.width))).transpose(1, 2) for x_TH in (q_TH, k_TH, v_TH)
        )
        seen_RLL = rows.pad(visible_TL)
        seen_RLL[..., :1] = True
        context_RNLD = attend_padded(
            q_RNLD,
            k_RNLD,
            v_RNLD,
            seen_RLL[:, None],
            rows,
            self.attention_dropout if self.training else 0.0,
            scale=self.width**-0.5,
        )
        return rows.unpad(context_RNLD.transpose(1, 2)).flatten(-2)


def visible_tokens(batch: Batch, rate: float) -> Bool[Tensor, "tokens longest"]:
    """Return which tokens of its row each query sees: the first token, and a random sample of the others except the
    query's own, each with probability 1 - `rate`.

    A draw is hashed from the query's token and the key's position (`random_draws.py`), and the rate is rounded to a
    multiple of 1/65,536. The paper's code hides a fixed number of whole words, and queries share at most 256 masks.
    Here each query has its own mask.
    """
    place_L, lengths_R = torch.arange(batch.max_length, device=batch.positions.device), batch.cu_seqlens.diff()
    length_T = lengths_R.repeat_interleave(lengths_R, output_size=batch.positions.numel())
    keep_TL = keep_mask(batch.random_keys, draw_key(), range(batch.max_length), drop_threshold(rate)).bool()
    here_TL = batch.positions[:, None]
    return ((keep_TL & (place_L != here_TL)) | (place_L == 0)) & (place_L < length_T[:, None])
