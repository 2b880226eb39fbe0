"""A decoder that writes rows token by token, and keeps keys and values between tokens.

The keys and values of attention to the tokens before grow by one token in each step; those of attention across, which
are the encoder's, are computed once. So a step computes one token of each row, and only its attention reads all before.
The newest token of a row sees all that were written: that, too, is attention across, from one token to the others.

Shapes: R rows, W tokens written in each of them, S of the encoder, H hidden, N heads, D head width.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.layers.cross_attention import DecoderLayer, attend_across
from encoder_core.layers.decoder import Decoder
from encoder_core.layers.rows import Rows


class IncrementalDecoder:
    """Writes the rows of a batch side by side, one token of each at a time: the states of `Decoder`, up to rounding.

    Args:
        decoder: the decoder, in evaluation mode.
        read_SH: the encoder's states.
        read: the rows that the encoder has read.
    """

    def __init__(self, decoder: Decoder, read_SH: Float[Tensor, "others hidden"], read: Batch) -> None:
        self._embeddings = decoder.embeddings
        others = Rows.of(read)
        self._layers = [_CachedLayer(cast(DecoderLayer, layer), read_SH, others) for layer in decoder.layers]
        self._written = 0

    def step(self, ids_R: Int[Tensor, " rows"]) -> Float[Tensor, "rows hidden"]:
        """Return the last layer's output, which predicts the next token of each row.

        Args:
            ids_R: the newest token of each row; in the first step the one that `decoder.following` puts before it.
        """
        batch = _one_each(ids_R, self._written)
        self._written += 1
        rows, written = Rows.of(batch), _all_as_long(self._written, ids_R)
        x_RH: Tensor = self._embeddings(batch)
        for layer in self._layers:
            x_RH = layer.step(x_RH, rows, written)
        return x_RH


class _CachedLayer:
    """A layer, with the keys and values of what its rows read and of what they have written, [R, W, N, D]."""

    def __init__(self, layer: DecoderLayer, read_SH: Tensor, others: Rows) -> None:
        self._layer = layer
        self._others = others
        self._read = layer.across.heads(read_SH)
        key_SND, value_SND = self._read
        self._key, self._value = (
            x_SND.new_zeros(others.count, 0, *x_SND.shape[1:]) for x_SND in (key_SND, value_SND)
        )

    def step(self, x_RH: Tensor, rows: Rows, written: Rows) -> Tensor:
        """Return the states after the layer, of `rows` of one token; `written`: the rows with all their tokens."""
        layer = self._layer
        q_RND, k_RND, v_RND = layer.attention.heads(x_RH, None)
        self._key = torch.cat((self._key, k_RND[:, None]), 1)
        self._value = torch.cat((self._value, v_RND[:, None]), 1)
        context_RND = attend_across(
            q_RND, self._key.flatten(0, 1), self._value.flatten(0, 1), rows, written, 0.0
        )
        y_RH, q_RH = layer.between(x_RH, context_RND.flatten(-2), rows.keys, (None,))
        found_RH = layer.across(q_RH, self._read, rows, self._others)
        return layer.after(y_RH, found_RH, rows.keys, (None, None))


def _one_each(ids_R: Tensor, position: int) -> Batch:
    """Return rows of one token each, which lies at `position`."""
    return Batch(
        tokens=ids_R,
        cu_seqlens=torch.arange(len(ids_R) + 1, dtype=torch.int32, device=ids_R.device),
        max_length=1,
        positions=torch.full_like(ids_R, position),
        target_positions=ids_R[:0],
        target_ids=ids_R[:0],
    )


def _all_as_long(length: int, ids_R: Tensor) -> Rows:
    """Return as many rows as `ids_R` has, of one length."""
    count, device = len(ids_R), ids_R.device
    return Rows(
        torch.arange(count + 1, dtype=torch.int32, device=device) * length,
        torch.arange(length, device=device).repeat(count),
        length,
    )
