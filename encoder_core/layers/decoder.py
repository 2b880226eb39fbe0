"""A Transformer's decoder over flat tokens: it writes a row token by token, and reads an encoder's states of the row.

Shapes: T tokens of the decoder, S of the encoder, R rows, H hidden.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.cross_attention import DecoderLayer
from encoder_core.layers.encoder import Embeddings, LayerStack
from encoder_core.layers.rows import Rows


class Decoder(LayerStack):
    """Embeddings and layers that see the tokens before, and all states of the encoder ("Attention Is All You Need",
    section 3.1).
    """

    def __init__(self, embeddings: Embeddings, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)

    def forward(
        self, batch: Batch, encoder_SH: Float[Tensor, "others hidden"], encoder_batch: Batch
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last layer's output. At each token it predicts that token: its input is the token before, and for
        a row's first token the row's last, `</s>` (facebookresearch/fairseq, `move_eos_to_beginning`).

        Args:
            batch: the rows to write.
            encoder_SH: the encoder's states.
            encoder_batch: the rows that the encoder has read, as many.
        """
        inputs = shift_right(batch)
        rows, others = Rows.from_batch(inputs), Rows.from_batch(encoder_batch)
        x_TH: Tensor = self.embeddings(inputs)
        for index in range(len(self.layers)):
            x_TH = self.run_layer(index, x_TH, rows, encoder_SH, others)
        return x_TH


def shift_right(batch: Batch) -> Batch:
    """Return causal rows whose tokens are each one behind, the last of a row being its first."""
    before_T = torch.arange(len(batch.tokens), device=batch.tokens.device) - 1
    starts_R, stops_R = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    before_T = before_T.index_copy(0, starts_R, stops_R - 1)
    return replace(batch, tokens=batch.tokens[before_T], causal=True, corrupted=None)
