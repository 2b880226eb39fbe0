"""Attention from a decoder's tokens to an encoder's, over flat tokens, and the decoder's layer around it.

Row i of the queries sees the whole of row i of other tokens, which are fewer or more: two sets of bounds ("Attention Is
All You Need", section 3.2.3). The kernels are those of `attention.py` that take two:

| kernel    | where                                          | how                                                  |
|-----------|------------------------------------------------|------------------------------------------------------|
| `flash`   | CUDA, bf16 or fp16, without dropout            | flash attention over both `cu_seqlens`, no padding   |
| `fused`   | CUDA, with dropout                             | our Triton kernels over both, no padding             |
| `blocked` | CPU, with dropout                              | row by row in cache-sized pieces                     |
| `padded`  | CPU without dropout; fp32 on CUDA              | two rectangles, torch's fused kernel                 |
| `written` | if a trial found all others wrong              | the formula on the same rectangles                   |

Shapes: T tokens of the decoder, S of the encoder, H hidden, N heads, D head width.
"""

from typing import assert_never

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.layers.attention import Heads, SelfAttention, attend_padded
from encoder_core.layers.cpu_attention import blocked_attention
from encoder_core.layers.dropout import Dropout
from encoder_core.layers.encoder import FeedForward
from encoder_core.layers.gpu_attention import flash_takes, fused_across, fused_takes, use_flash3
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.parameters import project
from encoder_core.layers.pieces import Draws, PieceWise, piece
from encoder_core.layers.residual import LayerNorm, normed_sum
from encoder_core.layers.rows import Rows
from encoder_core.layers.torch_internals import flash_attention

OtherHeads = Float[Tensor, "others heads width"]


def attend_across(
    q_TND: Heads, k_SND: OtherHeads, v_SND: OtherHeads, rows: Rows, others: Rows, dropout: float
) -> Heads:
    """Return softmax(q k' / sqrt(D)) v, where the queries of each of `rows` see the same row of `others`. Dropout acts
    on probabilities. Without tokens, as on an idle rank, nothing is computed.
    """
    if not len(q_TND):
        return q_TND + k_SND.sum() + v_SND.sum()
    kernel = pick(_possible_kernels(q_TND, dropout), dropped=dropout > 0.0)
    use_flash3(False)
    match kernel:
        case "flash":
            return _flash(q_TND, k_SND, v_SND, rows, others, dropout)
        case "blocked":
            context_TND: Tensor = blocked_attention(
                q_TND, k_SND, v_SND, rows.keys, rows.bounds, dropout, None, False, others.bounds
            )
            return context_TND
        case "padded" | "written":
            by_torch = kernel == "padded"
            return _in_rectangles(q_TND, k_SND, v_SND, rows, others, dropout, by_torch=by_torch)
        case "fused":
            return fused_across(q_TND, k_SND, v_SND, rows, others, dropout)
        case "flash3" | "cudnn":
            raise AssertionError(f"{kernel} is not among the possible kernels")
        case _ as never:
            assert_never(never)


def _possible_kernels(q_TND: Tensor, dropout: float) -> list[Kernel]:
    """Return the possible kernels, the usual one first. With dropout, kernels that draw by token come first."""
    kind = (q_TND.device.type, q_TND.dtype, q_TND.shape[-1])
    if q_TND.device.type == "cpu":
        return ["blocked", "padded", "written"] if dropout > 0.0 else ["padded", "blocked", "written"]
    ours: list[Kernel] = ["fused"] if fused_takes(*kind) else []
    flash: list[Kernel] = ["flash"] if flash_takes(*kind) else []
    return [*ours, *flash, "padded", "written"] if dropout > 0.0 else [*flash, "padded", *ours, "written"]


def _flash(
    q_TND: Heads, k_SND: OtherHeads, v_SND: OtherHeads, rows: Rows, others: Rows, dropout: float
) -> Heads:
    return flash_attention(
        q_TND,
        k_SND,
        v_SND,
        rows.cu_seqlens,
        others.cu_seqlens,
        rows.max_length,
        others.max_length,
        dropout,
        window=None,
        causal=False,
    )


def _in_rectangles(
    q_TND: Heads,
    k_SND: OtherHeads,
    v_SND: OtherHeads,
    rows: Rows,
    others: Rows,
    dropout: float,
    *,
    by_torch: bool,
) -> Heads:
    q_RNQD = rows.pad(q_TND).transpose(1, 2)
    k_RNKD, v_RNKD = (others.pad(x).transpose(1, 2) for x in (k_SND, v_SND))
    scale = q_TND.shape[-1] ** -0.5
    context_RNQD = attend_padded(
        q_RNQD, k_RNKD, v_RNKD, others.mask, rows, dropout, scale=scale, by_torch=by_torch
    )
    return rows.unpad(context_RNQD.transpose(1, 2))


class CrossAttention(nn.Module):
    """Attention to an encoder's states, with its projections ("Attention Is All You Need", section 3.2.3)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width = hidden // heads
        self.dropout = dropout
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))

    def heads(self, read_SH: Float[Tensor, "others hidden"]) -> tuple[OtherHeads, OtherHeads]:
        """Return keys and values of an encoder's states."""
        k_SH, v_SH = project(read_SH, (self.key, self.value))
        return torch.unflatten(k_SH, -1, (-1, self.width)), torch.unflatten(v_SH, -1, (-1, self.width))

    def forward(
        self,
        q_TH: Float[Tensor, "tokens hidden"],
        heads: tuple[OtherHeads, OtherHeads],
        rows: Rows,
        others: Rows,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the context, which the layer passes to `output`. `q_TH`: projected queries; `heads`: keys and values
        of the rows `others`.
        """
        q_TND = torch.unflatten(q_TH, -1, (-1, self.width))
        dropout = self.dropout if self.training else 0.0
        return attend_across(q_TND, *heads, rows, others, dropout).flatten(-2)


class DecoderLayer(PieceWise):
    """Attention to the tokens before, attention across, and feed-forward, each followed by dropout, residual sum and
    LayerNorm ("Attention Is All You Need", section 3.1).
    """

    def __init__(
        self,
        attention: SelfAttention,
        across: CrossAttention,
        feed_forward: FeedForward,
        hidden: int,
        *,
        eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = LayerNorm(hidden, eps=eps)
        self.across = across
        self.across_norm = LayerNorm(hidden, eps=eps)
        self.feed_forward = feed_forward
        self.feed_forward_norm = LayerNorm(hidden, eps=eps)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x_TH: Float[Tensor, "tokens hidden"],
        rows: Rows,
        read_SH: Float[Tensor, "others hidden"],
        others: Rows,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states after the layer. `read_SH`: the encoder's states, in the rows `others`."""
        context_TH = self.attention(self.attention.heads(x_TH, None), rows)
        draws = self.dropout.draw(), self.dropout.draw(), self.dropout.draw()
        y_TH, q_TH = self.between(x_TH, context_TH, rows.keys, draws[:1])
        found_TH = self.across(q_TH, self.across.heads(read_SH), rows, others)
        return self.after(y_TH, found_TH, rows.keys, draws[1:])

    @piece
    def between(
        self, x_TH: Tensor, context_TH: Tensor, keys_T: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """Compute the part of the layer between its two kernels: the states, and the queries of the second."""
        attended_TH = self.attention.output(context_TH)
        y_TH = normed_sum(self.attention_norm, x_TH, attended_TH, self.dropout, keys_T, draws[0])
        return y_TH, self.across.query(y_TH)

    @piece
    def after(self, y_TH: Tensor, found_TH: Tensor, keys_T: Tensor, draws: Draws) -> Tensor:
        """Compute the part of the layer after both kernels."""
        z_TH = normed_sum(
            self.across_norm, y_TH, self.across.output(found_TH), self.dropout, keys_T, draws[0]
        )
        inner_TH = self.feed_forward(z_TH)
        return normed_sum(self.feed_forward_norm, z_TH, inner_TH, self.dropout, keys_T, draws[1])
