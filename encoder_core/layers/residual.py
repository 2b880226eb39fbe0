"""The end of a block: dropout, the sum with the residual, and the norm of the sum.

| kernel    | where                                             | how                                               |
|-----------|---------------------------------------------------|---------------------------------------------------|
| `fused`   | CUDA with Triton, after a trial found it correct  | one kernel (`encoder_core/kernels/residual_norm`) |
| `written` | everywhere                                        | torch operations, which torch.compile can fuse    |

The trial (`encoder_core/trials`) runs before training. The fused kernel is called in the norm's own `forward`, because
at ZeRO 3 the norm's weight is gathered only there.

Shapes: T tokens, H hidden.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from encoder_core.layers.dropout import Dropout, drop_threshold
from encoder_core.layers.gpu_attention import has_triton
from encoder_core.layers.kernel_choice import pick
from encoder_core.layers.planned import is_planned, planned_norm, planned_rms_norm
from encoder_core.layers.sizes import GPU_DEVICE_TYPES

_MAX_ROW_WIDTH = 8192  # largest hidden width that one program of the fused kernel can hold in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the fused kernel supports


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which can also compute dropout, sum and norm with one kernel.

    With `added`, it returns `input` + dropout(`added`), and the norm of this sum. `draws`: each token's key plus the
    key of the draw; None: no dropout. `threshold`: from `drop_threshold`.
    """

    def forward(
        self, input: Tensor, added: Tensor | None = None, draws: Tensor | None = None, threshold: int = 0
    ) -> Any:
        if added is None:
            return super().forward(input)
        return _fused_norm(self, self.bias, True, input, added, draws, threshold)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, extended in the same way as `LayerNorm`."""

    def forward(self, x: Tensor, added: Tensor | None = None, draws: Tensor | None = None, threshold: int = 0) -> Any:
        if added is None:
            return planned_rms_norm(x, self.weight) if x.is_meta else super().forward(x)
        return _fused_norm(self, None, False, x, added, draws, threshold)


def normed_sum(
    norm: nn.Module,
    residual_TH: Float[Tensor, "tokens hidden"],
    x_TH: Float[Tensor, "tokens hidden"],
    dropout: Dropout,
    keys_T: Int[Tensor, " tokens"],
    draw: Int[Tensor, ""] | None,
) -> Float[Tensor, "tokens hidden"]:
    """Return norm(residual + dropout(x)). `keys_T`: tokens' keys for random draws; `draw`: `dropout.next_draw()`."""
    return sum_and_norm(norm, residual_TH, x_TH, dropout, keys_T, draw)[1]


def sum_and_norm(
    norm: nn.Module,
    residual_TH: Float[Tensor, "tokens hidden"],
    x_TH: Float[Tensor, "tokens hidden"],
    dropout: Dropout,
    keys_T: Int[Tensor, " tokens"],
    draw: Int[Tensor, ""] | None,
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
    """Return residual + dropout(x), and the norm of this sum; see `normed_sum`."""
    if _supports(norm, residual_TH, x_TH) and _uses_fused_kernel(draw):
        draws_T = None if draw is None else keys_T + draw
        both: tuple[Tensor, Tensor] = norm(residual_TH, x_TH, draws_T, drop_threshold(dropout.rate))
        return both
    total_TH = residual_TH + dropout.apply_draw(draw, x_TH, keys_T)
    return total_TH, norm(total_TH)


def _uses_fused_kernel(draw: Tensor | None) -> bool:
    return pick(["fused", "written"], dropped=draw is not None, place="norm") == "fused"


def _supports(norm: nn.Module, residual_TH: Tensor, x_TH: Tensor) -> bool:
    """Return whether the fused kernel supports this norm and these tensors."""
    return (
        x_TH.device.type in GPU_DEVICE_TYPES
        and not torch.compiler.is_compiling()
        and isinstance(norm, LayerNorm | RMSNorm)
        and norm.eps is not None
        and x_TH.dtype in _DTYPES
        and x_TH.dtype == residual_TH.dtype == norm.weight.dtype
        and x_TH.shape[-1] <= _MAX_ROW_WIDTH
        and (x_TH.is_meta or has_triton())
    )


def _fused_norm(
    norm: nn.LayerNorm | nn.RMSNorm,
    bias: Tensor | None,
    centered: bool,
    residual_TH: Tensor,
    x_TH: Tensor,
    draws_T: Tensor | None,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """Compute `sum_and_norm` with the fused kernel, or with its stand-in on the meta device."""
    if is_planned(x_TH):
        return planned_norm(x_TH, residual_TH, norm.weight, bias, draws_T, centered)
    from encoder_core.kernels.residual_norm import NormParameters, residual_norm

    assert norm.eps is not None
    return residual_norm(x_TH, residual_TH, NormParameters(norm.weight, bias, norm.eps, centered), draws_T, threshold)
