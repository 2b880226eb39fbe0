"""Multi-head self-attention over flat tokens, and the kernels that compute it inside rows.

Only a kernel knows about rows. All are of one signature, `Attend`:

| function       | where                                | how                                              |
|----------------|--------------------------------------|--------------------------------------------------|
| `varlen_flash` | CUDA, bf16 or fp16, without dropout  | flash attention over `cu_seqlens`, no padding    |
| the same       | Hopper, where a trial prefers it     | FlashAttention-3, if its package is there        |
| `fused`        | CUDA, with dropout; fp32 in a window | our Triton kernels, no padding                   |
| `blocked`      | CPU, with dropout or a window        | row by row in cache-sized pieces                 |
| `padded_sdpa`  | everything else                      | rows padded to a rectangle, torch's fused kernel |
| `written`      | where a trial found no other right   | the formula in that rectangle                    |
| `reference`    | tests                                | the formula, row by row                          |

`automatic` picks among the first six (`kernel_choice.py`). Flash attention draws its dropout from the device's
generator, `fused` from what a token's draws belong to (`draws.py`): flash attention has dropout only where there is no
Triton. torch's fused CPU kernel has no dropout and falls back to one that writes out every score three times, which is
why `blocked` exists. It has no window either: with a mask it computes every score of a row.

A `window` is local attention (Beltagy et al., 2020, section 3.1): a query sees the keys of its row that are at most
that many tokens away, on both sides; None: the whole row.

Keys and values may have fewer heads than queries: grouped-query attention (Ainslie et al., 2023), in which as many
query heads in a row share one. Flash attention has that built in, the others repeat keys and values.

`RelativeKeyAttention` (`relative_key.py`) is one, too.

Shapes: T tokens, R rows, L longest row, H hidden, N heads, D head width (H = N * D).
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.layers.cpu_attention import blocked_attention
from encoder_core.layers.dropout import dropout as drop
from encoder_core.layers.gpu_attention import (
    activate,
    flash3_takes,
    flash_takes,
    fused_attention,
    fused_takes,
)
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.parameters import JoinedLinear, ScaledLinear, project
from encoder_core.layers.rows import Rotation, Rows, for_each_query, rotate
from encoder_core.layers.torch_internals import flash_attention
from encoder_core.random_draws import draw_key, head_keys

Heads = Float[Tensor, "tokens heads width"]
SharedHeads = Float[Tensor, "tokens shared width"]  # of keys and values


@runtime_checkable
class Attend(Protocol):
    """(query, key, value, rows, dropout, window) -> context: four [T, N, D] tensors; dropout acts on probabilities.
    Key and value may have fewer heads, of which N is a multiple."""

    def __call__(
        self,
        q_TND: Tensor,
        k_TND: Tensor,
        v_TND: Tensor,
        rows: Rows,
        dropout: float,
        window: int | None = None,
        /,
    ) -> Tensor: ...


def automatic(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """The best kernel for the tensors at hand. No tokens at all (an idle rank's batch) is no work."""
    if not len(q_TND):
        return sum(for_each_query(q_TND, k_TND, v_TND), q_TND)
    kernel = pick(_possible(q_TND, rows, dropout, window), dropped=dropout > 0.0)
    activate(kernel == "flash3")
    match kernel:
        case "fused":
            return fused(q_TND, k_TND, v_TND, rows, dropout, window)
        case "flash" | "flash3":
            return varlen_flash(q_TND, k_TND, v_TND, rows, dropout, window)
        case "blocked":
            return blocked(q_TND, k_TND, v_TND, rows, dropout, window)
        case "padded":
            return padded_sdpa(q_TND, k_TND, v_TND, rows, dropout, window)
        case "written":
            return written(q_TND, k_TND, v_TND, rows, dropout, window)


def _possible(q_TND: Heads, rows: Rows, dropout: float, window: int | None) -> list[Kernel]:
    """The usual one first. Those that draw by tokens come first where there is dropout."""
    kind, special = (q_TND.device.type, q_TND.dtype, q_TND.shape[-1]), dropout > 0.0 or rows.exceed(window)
    if q_TND.device.type == "cpu":
        return ["blocked", "padded", "written"] if special else ["padded", "blocked", "written"]
    ours: list[Kernel] = ["fused"] if fused_takes(*kind) else []
    flash: list[Kernel] = ["flash"] if flash_takes(*kind) else []
    if dropout > 0.0 or (special and not flash):
        return [*ours, *flash, "padded", "written"]
    third: list[Kernel] = ["flash3"] if flash3_takes(q_TND.device, *kind[1:], dropout) else []
    return [*flash, *third, "padded", *ours, "written"]


def varlen_flash(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """FlashAttention-2 (Dao, 2023) over rows of different lengths.

    This is the operator beneath `torch.nn.attention.varlen.varlen_attn`, called directly because that wrapper
    fixes dropout at 0. The operator carries its own derivative and draws from the CUDA generator.
    """
    return flash_attention(
        q_TND,
        k_TND,
        v_TND,
        rows.cu_seqlens,
        rows.cu_seqlens,
        rows.max_length,
        rows.max_length,
        dropout,
        False,  # is_causal
        False,  # return_debug_mask
        window=window,
    )


def fused(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """Exact attention in tiles, without padding and without a score in memory; see `encoder_core/kernels`."""
    k_TND, v_TND = for_each_query(q_TND, k_TND, v_TND)
    return fused_attention(
        q_TND,
        k_TND,
        v_TND,
        query_rows=rows,
        rows=rows,
        scale=q_TND.shape[-1] ** -0.5,
        dropout=dropout,
        window=window,
    )


def padded_sdpa(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """torch's fused attention on a padded rectangle; no mask where rows are equally long and the window holds them."""
    return _in_rectangle(q_TND, k_TND, v_TND, rows, dropout, window)


def written(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """The formula on that rectangle, every score in memory; dropout belongs to tokens on every device."""
    return _in_rectangle(q_TND, k_TND, v_TND, rows, dropout, window, by_torch=False)


def _in_rectangle(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None,
    *,
    by_torch: bool = True,
) -> Heads:
    k_TND, v_TND = for_each_query(q_TND, k_TND, v_TND)
    q_RNLD, k_RNLD, v_RNLD = (rows.pad(x).transpose(1, 2) for x in (q_TND, k_TND, v_TND))
    mask, scale = rows.mask_within(window), q_TND.shape[-1] ** -0.5
    context_RNLD = attend_padded(q_RNLD, k_RNLD, v_RNLD, mask, rows, dropout, scale=scale, by_torch=by_torch)
    return rows.unpad(context_RNLD.transpose(1, 2))


def attend_padded(
    q_RNQD: Float[Tensor, "rows heads queries width"],
    k_RNKD: Float[Tensor, "rows heads keys width"],
    v_RNKD: Float[Tensor, "rows heads keys width"],
    bias: Tensor | None,
    query_rows: Rows,
    dropout: float,
    *,
    scale: float,
    by_torch: bool = True,
) -> Float[Tensor, "rows heads queries width"]:
    """softmax(scale q k' + bias) v of a rectangle. `bias` [R, N, Q, K] is added, or if bool, its false keys are hidden.

    torch's fused attention, except that on a CPU it has no fused dropout (on a GPU it has, which belongs to the
    rectangle and not to the tokens), and that of no rows (an idle batch) it leaves the bias out of the graph, and so
    parameters that ZeRO waits for on every rank. Without `by_torch` never.
    """
    if by_torch and len(q_RNQD) and (not dropout or q_RNQD.device.type != "cpu"):
        return F.scaled_dot_product_attention(
            q_RNQD, k_RNKD, v_RNKD, attn_mask=bias, dropout_p=dropout, scale=scale
        )
    scores_RNQK = (q_RNQD * scale) @ k_RNKD.transpose(-1, -2)
    if bias is not None and bias.dtype == torch.bool:
        scores_RNQK = scores_RNQK.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores_RNQK = scores_RNQK + bias
    drawn_RNQ = head_keys(query_rows.pad(query_rows.keys), range(q_RNQD.shape[1])).transpose(1, 2)
    weights_RNQK: Tensor = drop(scores_RNQK.softmax(-1), dropout, drawn_RNQ)
    return weights_RNQK @ v_RNKD


def blocked(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """Exact attention in cache-sized pieces without padding, dropout included; see `cpu_attention.py`."""
    k_TND, v_TND = for_each_query(q_TND, k_TND, v_TND)
    context_TND: Tensor = blocked_attention(q_TND, k_TND, v_TND, rows.keys, rows.bounds, dropout, window)
    return context_TND


def reference(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
) -> Heads:
    """softmax(q k' / sqrt(D)) v over the keys in sight, one row after the other, in the precision of its inputs."""
    k_TND, v_TND = for_each_query(q_TND, k_TND, v_TND)
    contexts, draw = [], draw_key()
    for start, stop in rows.bounds:
        q_NLD, k_NLD, v_NLD = (x[start:stop].transpose(0, 1) for x in (q_TND, k_TND, v_TND))
        scores_NLL = q_NLD @ k_NLD.transpose(1, 2) / q_NLD.shape[-1] ** 0.5
        if window is not None:
            at_L = torch.arange(stop - start, device=q_TND.device)
            scores_NLL = scores_NLL.masked_fill((at_L[:, None] - at_L).abs() > window, float("-inf"))
        drawn_NL = head_keys(rows.keys[start:stop], range(len(q_NLD))).t()
        weights_NLL = drop(scores_NLL.softmax(-1), dropout, drawn_NL, draw)
        contexts.append((weights_NLL @ v_NLD).transpose(0, 1))
    return torch.cat(contexts)


class SelfAttention(nn.Module):
    """Scaled dot-product self-attention with its projections ("Attention Is All You Need", section 3.2).

    Query, key and value are separate parameters, or with `fused` the three parts of one, whichever the family
    published: so an optimizer with a trust ratio per parameter (LAMB) sees the matrices that its authors saw.

    Attributes:
        key_value_heads: heads of keys and values, which `heads` is a multiple of (see the module); None: as many.
        window: see the module; None: all of the row.
        rotary_base: queries and keys are turned by their positions (`rows.py`); None: they are not.
        output_scale: of the output projection's fresh weights (`parameters.ScaledLinear`).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        dropout: float,
        attend: Attend,
        *,
        bias: bool = True,
        fused: bool = False,
        key_value_heads: int | None = None,
        window: int | None = None,
        rotary_base: float | None = None,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.width = hidden // heads
        self.dropout = dropout
        self.attend = attend
        self.fused = fused
        self.window = window
        self.rotary_base = rotary_base
        shared = (key_value_heads or heads) * self.width
        self.parts = (hidden, shared, shared)
        if fused:
            self.qkv = JoinedLinear(hidden, self.parts, bias)
        else:
            self.query, self.key, self.value = (nn.Linear(hidden, part, bias) for part in self.parts)
        self.output = ScaledLinear(hidden, hidden, bias, scale=output_scale)

    def forward(
        self, heads: tuple[Heads, SharedHeads, SharedHeads], rows: Rows
    ) -> Float[Tensor, "tokens hidden"]:
        """What the kernel makes of queries, keys and values. The layer passes it to `output`."""
        context_TND = self.attend(*heads, rows, self.dropout if self.training else 0.0, self.window)
        return context_TND.flatten(-2)

    def rotation(self, rows: Rows) -> Rotation | None:
        """By which `heads` turns queries and keys; None where positions are no angles."""
        return None if self.rotary_base is None else rows.rotation(self.rotary_base, self.width)

    def heads(
        self, x_TH: Float[Tensor, "tokens hidden"], rotation: Rotation | None
    ) -> tuple[Heads, SharedHeads, SharedHeads]:
        """Queries, keys and values."""
        q_TND, k_TND, v_TND = (torch.unflatten(x_TH, -1, (-1, self.width)) for x_TH in self._projected(x_TH))
        if rotation is not None:
            q_TND, k_TND = rotate(q_TND, rotation), rotate(k_TND, rotation)
        return q_TND, k_TND, v_TND

    def _projected(self, x_TH: Tensor) -> tuple[Tensor, ...]:
        if self.fused:
            q_TH, k_TH, v_TH = self.qkv(x_TH).split(self.parts, -1)
            # Turned queries and keys are new tensors. Values that stayed a view would keep the old ones in memory too.
            return q_TH, k_TH, v_TH if self.rotary_base is None else v_TH.contiguous()
        if self.rotary_base is None:
            return project(x_TH, (self.query, self.key, self.value))
        return *project(x_TH, (self.query, self.key)), self.value(x_TH)  # turned at once, so only values stay


def set_rotary_base(model: nn.Module, base: float) -> None:
    """From now on, turn queries and keys by angles of this base in every layer of `model` that sees the whole row and
    has rotary positions. No weight depends on it."""
    for module in model.modules():
        if isinstance(module, SelfAttention) and module.rotary_base is not None and module.window is None:
            module.rotary_base = base
