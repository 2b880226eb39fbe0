"""Multi-head attention over flat tokens, and the kernels that compute it within each row.

Only kernels separate rows. All have the signature `AttentionKernel`. Before training, a trial (`encoder_core/trials`)
checks and times them.

| function          | where                                | how                                              |
|-------------------|--------------------------------------|--------------------------------------------------|
| `varlen_flash`    | CUDA, bf16 or fp16, without dropout  | flash attention over `cu_seqlens`, no padding    |
| `varlen_flash`    | Hopper, Blackwell, if a trial        | FlashAttention-3 or -4, if its package is        |
|                   | prefers it                           | installed                                        |
| `attend_fused`    | CUDA, with dropout; fp32 in a window | our Triton kernels, no padding                   |
| `attend_blocked`  | CPU, with dropout or a window        | row by row in cache-sized pieces                 |
| `padded_sdpa`     | everything else                      | rows padded to a rectangle, torch's fused kernel |
| `cudnn_attention` | full rows, where a trial prefers it  | cuDNN's attention, without a mask                |
| `written_formula` | if a trial found all others wrong    | elementary operations on a padded rectangle      |

`attend_with_best_kernel` chooses among them (`kernel_choice.py`). Flash attention draws its dropout from the device's
generator; `attend_fused` hashes it from tokens (`random_draws.py`). So flash attention is used with dropout only
without Triton. `attend_blocked` exists because torch's fused CPU kernel supports no dropout: with it, torch uses a
kernel that writes every score to memory three times. For a window torch takes a mask and computes all scores of a row.

A `window` is local attention (Beltagy et al., 2020, section 3.1): a query sees the keys of its row that are at most
that many tokens away, on both sides. None: the whole row.

Rows may be causal (`Rows.causal`), a property of the batch: then a query sees no later key. Kernels skip hidden scores:
flash attention and `attend_fused` by tiles, `attend_blocked` by blocks, torch's SDPA by its option. No weight depends
on causality, so the same layers train on causal and on other rows.

Keys and values may have fewer heads than queries: grouped-query attention (Ainslie et al., 2023), in which equally
many consecutive query heads share a head of keys and values. Flash attention supports this; for other kernels keys and
values are repeated. `RelativeKeyAttention` (`relative_key.py`) is an `AttentionKernel` too.

In cross-attention ("Attention Is All You Need", section 3.2.3) keys and values belong to S other tokens, in rows
`key_rows`: a query of row i sees the whole row i of those. Cross-attention has no windows, and is not computed by
FlashAttention-3 or -4, or cuDNN.

Shapes: T tokens, R rows, L longest row, H hidden, N heads, D head width (H = N * D).
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.layers.cpu_attention import blocked_attention
from encoder_core.layers.dropout import dropout as drop
from encoder_core.layers.gpu_attention import (
    cudnn_attention,
    cudnn_supports,
    flash_supports,
    fused_attention,
    fused_supports,
    newer_flash_kernels,
    switch_flash,
    torch_attention,
)
from encoder_core.layers.kernel_choice import Kernel, pick
from encoder_core.layers.parameters import JoinedLinear, ScaledLinear, project
from encoder_core.layers.planned import planned_sdpa
from encoder_core.layers.rows import Rotation, Rows, repeat_shared_heads, rotate
from encoder_core.layers.torch_internals import flash_attention
from encoder_core.random_draws import head_keys

Heads = Float[Tensor, "tokens heads width"]
SharedHeads = Float[Tensor, "keys shared width"]  # heads of keys and values, shared by several queries


@runtime_checkable
class AttentionKernel(Protocol):
    """A kernel: (queries, keys, values, rows, dropout, window) -> context. All tensors are [T, N, D].

    Dropout acts on probabilities. Keys and values may have fewer heads, of which N is a multiple.
    """

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


def attend_with_best_kernel(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute attention with the best kernel. Without tokens, as on idle ranks, no kernel runs."""
    if not len(q_TND):
        return q_TND + k_TND.sum() + v_TND.sum()
    kernel = pick(_possible_kernels(q_TND, rows, dropout, window, key_rows), dropped=dropout > 0.0)
    switch_flash(kernel)
    given = (q_TND, k_TND, v_TND, rows, dropout, window, key_rows)
    match kernel:
        case "fused":
            return attend_fused(*given)
        case "flash" | "flash3" | "flash4":
            return varlen_flash(*given)
        case "cudnn":
            return cudnn_attention(*given[:4])
        case "blocked":
            return attend_blocked(*given)
        case "padded":
            return padded_sdpa(*given)
        case "written":
            return written_formula(*given)


def _possible_kernels(
    q_TND: Heads, rows: Rows, dropout: float, window: int | None, key_rows: Rows | None
) -> list[Kernel]:
    """Return the kernels that support these tensors, the default first; with dropout one that hashes draws, if any."""
    kind, special = (
        (q_TND.device.type, q_TND.dtype, q_TND.shape[-1]),
        dropout > 0.0 or rows.exceeds_window(window),
    )
    if q_TND.device.type == "cpu":
        return ["blocked", "padded", "written"] if special else ["padded", "blocked", "written"]
    ours: list[Kernel] = ["fused"] if fused_supports(*kind) else []
    flash: list[Kernel] = ["flash"] if flash_supports(*kind) else []
    if dropout > 0.0 or (special and not flash):
        return [*ours, *flash, "padded", "written"]
    if key_rows is not None:
        return [*flash, "padded", *ours, "written"]
    newer = newer_flash_kernels(q_TND.device, *kind[1:])
    whole: list[Kernel] = ["cudnn"] if not special and cudnn_supports(q_TND, rows) else []
    return [*flash, *newer, *whole, "padded", *ours, "written"]


def varlen_flash(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute FlashAttention-2 (Dao, 2023) over rows of different lengths.

    This calls the operator beneath `torch.nn.attention.varlen.varlen_attn` directly, because that wrapper fixes
    dropout at 0. The operator has its own backward pass and draws from the CUDA generator.
    """
    return flash_attention(
        q_TND,
        k_TND,
        v_TND,
        rows.cu_seqlens,
        (key_rows or rows).cu_seqlens,
        rows.max_length,
        (key_rows or rows).max_length,
        dropout,
        window=window,
        causal=rows.causal and key_rows is None,
    )


def attend_fused(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute exact attention in tiles, without padding and without scores in memory; see `encoder_core/kernels`."""
    k_TND, v_TND = repeat_shared_heads(q_TND, k_TND, v_TND)
    return fused_attention(
        q_TND,
        k_TND,
        v_TND,
        query_rows=rows,
        rows=rows,
        key_rows=key_rows,
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
    key_rows: Rows | None = None,
) -> Heads:
    """Compute torch's fused attention on a padded rectangle, with a mask unless rows are full and within the window."""
    return _attend_in_rectangle(q_TND, k_TND, v_TND, rows, dropout, window, key_rows)


def written_formula(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute attention by elementary operations on a padded rectangle, with every score in memory. On every device,
    dropout is hashed from tokens."""
    return _attend_in_rectangle(q_TND, k_TND, v_TND, rows, dropout, window, key_rows, use_torch=False)


def _attend_in_rectangle(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None,
    key_rows: Rows | None,
    *,
    use_torch: bool = True,
) -> Heads:
    """Pad all rows to one length, and compute attention; see `attend_padded`."""
    k_TND, v_TND = repeat_shared_heads(q_TND, k_TND, v_TND)
    q_RNLD = rows.pad(q_TND).transpose(1, 2)
    k_RNLD, v_RNLD = ((key_rows or rows).pad(x).transpose(1, 2) for x in (k_TND, v_TND))
    # Padding follows a row's tokens, so a causal mask, which hides later keys, also hides padding.
    plain = key_rows is None and rows.causal and not rows.exceeds_window(window)
    causal = plain and _torch_supports(q_RNLD, dropout, use_torch=use_torch)
    if causal and q_TND.is_meta:
        context_RNLD = planned_sdpa(q_RNLD, k_RNLD, v_RNLD, None, dropout, None, causal=True)
    elif causal:
        context_RNLD = torch_attention(q_RNLD, k_RNLD, v_RNLD, dropout_p=dropout, is_causal=True)
    else:
        mask = rows.mask_within(window) if key_rows is None else key_rows.mask
        scale = q_TND.shape[-1] ** -0.5
        context_RNLD = attend_padded(q_RNLD, k_RNLD, v_RNLD, mask, rows, dropout, scale=scale, use_torch=use_torch)
    return rows.unpad(context_RNLD.transpose(1, 2))


def _torch_supports(q_RNQD: Tensor, dropout: float, *, use_torch: bool) -> bool:
    """Return whether torch's fused attention can be used for this rectangle; see `attend_padded`."""
    return use_torch and bool(len(q_RNQD)) and (not dropout or q_RNQD.device.type != "cpu")


def attend_padded(
    q_RNQD: Float[Tensor, "rows heads queries width"],
    k_RNKD: Float[Tensor, "rows heads keys width"],
    v_RNKD: Float[Tensor, "rows heads keys width"],
    bias: Tensor | None,
    query_rows: Rows,
    dropout: float,
    *,
    scale: float,
    use_torch: bool = True,
) -> Float[Tensor, "rows heads queries width"]:
    """Return softmax(scale q k' + bias) v on a rectangle. `bias` is [R, N, Q, K]; in a bool bias, false hides a key.

    torch's fused attention is used, with two exceptions, in which elementary operations are: with dropout on a CPU,
    where torch has no fused dropout, and for an idle batch, for which torch would leave the bias out of the graph, and
    so parameters for which ZeRO waits on every rank. On a GPU, torch's dropout is not hashed from tokens.

    `use_torch` false: elementary operations in any case.
    """
    if q_RNQD.is_meta:
        return planned_sdpa(q_RNQD, k_RNKD, v_RNKD, bias, dropout, scale)
    if _torch_supports(q_RNQD, dropout, use_torch=use_torch):
        return torch_attention(q_RNQD, k_RNKD, v_RNKD, attn_mask=bias, dropout_p=dropout, scale=scale)
    scores_RNQK = (q_RNQD * scale) @ k_RNKD.transpose(-1, -2)
    if bias is not None and bias.dtype == torch.bool:
        scores_RNQK = scores_RNQK.masked_fill(~bias, float("-inf"))
    elif bias is not None:
        scores_RNQK = scores_RNQK + bias
    drawn_RNQ = head_keys(query_rows.pad(query_rows.random_keys), range(q_RNQD.shape[1])).transpose(1, 2)
    weights_RNQK: Tensor = drop(scores_RNQK.softmax(-1), dropout, drawn_RNQ)
    return weights_RNQK @ v_RNKD


def attend_blocked(
    q_TND: Heads,
    k_TND: SharedHeads,
    v_TND: SharedHeads,
    rows: Rows,
    dropout: float,
    window: int | None = None,
    key_rows: Rows | None = None,
) -> Heads:
    """Compute exact attention on a CPU, in cache-sized pieces without padding; see `cpu_attention.py`."""
    k_TND, v_TND = repeat_shared_heads(q_TND, k_TND, v_TND)
    causal, bounds = (rows.causal, None) if key_rows is None else (False, key_rows.bounds)
    context_TND: Tensor = blocked_attention(
        q_TND, k_TND, v_TND, rows.random_keys, rows.bounds, dropout, window, causal, bounds
    )
    return context_TND


class SelfAttention(nn.Module):
    """Scaled dot-product self-attention with its projections ("Attention Is All You Need", section 3.2).

    Query, key and value projections are separate parameters or, with `fused`, three parts of one parameter, as the
    family published them. So an optimizer with a trust ratio for each parameter (LAMB) sees the same matrices as its
    authors did.

    Args:
        key_value_heads: number of heads of keys and values, of which `heads` is a multiple; None: `heads`.
        window: number of tokens visible on each side (see the module); None: the whole row.
        rotary_base: base of the angles by which queries and keys are rotated (`rows.py`); None: no rotation.
        output_scale: scale of the output projection's initial weights (`parameters.ScaledLinear`).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        dropout: float,
        attend: AttentionKernel,
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

    def forward(self, heads: tuple[Heads, SharedHeads, SharedHeads], rows: Rows) -> Float[Tensor, "tokens hidden"]:
        """Return the kernel's context for (queries, keys, values); the layer then applies `output`."""
        context_TND = self.attend(*heads, rows, self.dropout if self.training else 0.0, self.window)
        return context_TND.flatten(-2)

    def rotation(self, rows: Rows) -> Rotation | None:
        """Return the rotation of queries and keys for `project_heads`; None if the model has no rotary positions."""
        return None if self.rotary_base is None else rows.rotation(self.rotary_base, self.width)

    def project_heads(
        self, x_TH: Float[Tensor, "tokens hidden"], rotation: Rotation | None
    ) -> tuple[Heads, SharedHeads, SharedHeads]:
        """Return queries, keys and values of the states; queries and keys are rotated if `rotation` is given."""
        q_TND, k_TND, v_TND = (torch.unflatten(x_TH, -1, (-1, self.width)) for x_TH in self._projected(x_TH))
        if rotation is not None:
            q_TND, k_TND = rotate(q_TND, rotation), rotate(k_TND, rotation)
        return q_TND, k_TND, v_TND

    def _projected(self, x_TH: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, neither split into heads nor rotated."""
        if self.fused:
            q_TH, k_TH, v_TH = self.qkv(x_TH).split(self.parts, -1)
            # Rotated queries and keys are new tensors. A view as values would keep the whole joint product alive.
            return q_TH, k_TH, v_TH if self.rotary_base is None else v_TH.contiguous()
        if self.rotary_base is None:
            return project(x_TH, (self.query, self.key, self.value))
        # Values are projected separately: the unrotated queries and keys are freed after rotation, values are not.
        return *project(x_TH, (self.query, self.key)), self.value(x_TH)


def set_rotary_base(model: nn.Module, base: float, *, local: bool) -> None:
    """Set the base of rotary positions in all layers of `model` that have a window (`local`), or in all others. Layers
    without rotary positions are unchanged; no weight depends on the base.
    """
    for module in model.modules():
        if not isinstance(module, SelfAttention) or module.rotary_base is None:
            continue
        if (module.window is not None) == local:
            module.rotary_base = base
