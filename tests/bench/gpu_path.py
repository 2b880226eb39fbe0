"""The path that a step takes on a GPU, without one: all is done but launching our kernels, whose names are told."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from encoder_core.layers import attention, deberta_attention
from encoder_core.layers.attention import SelfAttention
from encoder_core.layers.deberta_attention import DisentangledAttention
from encoder_core.layers.kernel_choice import Preference, set_preference


@contextmanager
def as_on_a_gpu(module: nn.Module, record: Callable[[str], None]) -> Iterator[None]:
    """`module`, on a CPU, as in bf16 on a GPU whose trial found all kernels right: attention by flash without dropout,
    else by our fused kernels; residual sums and their norms, and the loss over the vocabulary, by ours."""
    for part in module.modules():
        if isinstance(part, DisentangledAttention):
            part.attend = deberta_attention.attend_fused
        elif isinstance(part, SelfAttention) and part.attend is attention.attend_with_best_kernel:
            part.attend = attention.attend_fused if part.dropout else _flash(record)
    with ExitStack() as stack:
        for room in ("gpu_attention", "residual"):
            place = import_module(f"encoder_core.layers.{room}")
            if hasattr(place, "is_planned"):
                stack.enter_context(patch.object(place, "is_planned", lambda x: False))
        for room in ("relative_key", "xlnet_attention"):
            place = import_module(f"encoder_core.layers.{room}")
            stack.enter_context(patch.object(place, "fused_supports", lambda device, dtype, width: True))
        if find_spec("encoder_core.layers.cross_attention"):
            across, flash = import_module("encoder_core.layers.cross_attention"), _flash(record)
            stack.enter_context(patch.object(across, "attend_with_best_kernel", lambda *given: flash(*given[:5])))
        cross_entropy = import_module("encoder_core.heads.cross_entropy")
        if hasattr(cross_entropy, "VOCAB_MULTIPLES"):
            stack.enter_context(patch.dict(cross_entropy.VOCAB_MULTIPLES, cpu=64))
        if "softmax_loss" in _kernels():
            stack.enter_context(patch.object(cross_entropy, "_supports", lambda features: True))
        if "residual_norm" in _kernels():
            residual = import_module("encoder_core.layers.residual")
            ours = (residual.LayerNorm, residual.RMSNorm)
            takes = lambda norm, residual_TH, x_TH: isinstance(norm, ours)  # noqa: E731
            stack.enter_context(patch.object(residual, "_supports", takes))
            stack.enter_context(patch.object(residual.RMSNorm, "forward", _rms_norm(residual.RMSNorm.forward)))
        if find_spec("encoder_core.heads.shallow_decoder"):
            decoder = import_module("encoder_core.heads.shallow_decoder")
            stack.enter_context(patch.object(decoder, "attend_padded", _masked(record)))
        stack.enter_context(launched(record))
        yield


def _rms_norm(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A norm by itself keeps what torch's kernel for GPUs keeps."""
    planned = import_module("encoder_core.layers.planned").planned_rms_norm

    def normed(norm: nn.RMSNorm, x: Tensor, added: Tensor | None = None, *given: Any) -> Any:
        return planned(x, norm.weight) if added is None else forward(norm, x, added, *given)

    return normed


def _masked(record: Callable[[str], None]) -> Callable[..., Tensor]:
    class Masked(torch.autograd.Function):
        """Keeps what torch's fused attention with a mask keeps: also the mask, in the precision of the operands."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            record("masked forward")
            out, sums = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
            ctx.save_for_backward(q, k, v, mask.to(q.dtype), out, sums)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            record("masked backward")
            return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None

    return lambda q, k, v, mask, rows, dropout, *, scale: Masked.apply(q, k, v, mask)


def _flash(record: Callable[[str], None]) -> Callable[..., Tensor]:
    class Flash(torch.autograd.Function):
        """Keeps what flash attention keeps: its operands, what comes out, and one sum for each query and head."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            record("flash forward")
            out, sums = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
            ctx.save_for_backward(q, k, v, out, sums)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            record("flash backward")
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])

    return lambda q, k, v, rows, dropout, window=None: Flash.apply(q, k, v)


_LAUNCHED = {
    "fused_attention": ("fused", ("forward", "queries", "keys")),
    "residual_norm": ("norm", ("forward", "backward")),
    "softmax_loss": ("loss", ("sums", "gradient")),
    "stable_adamw": ("update", ("moments", "squares", "weights")),
}


def _kernels() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Those that this commit has: what they are called here, and their names."""
    return {name: told for name, told in _LAUNCHED.items() if find_spec(f"encoder_core.kernels.{name}")}


@contextmanager
def launched(record: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, our kernels are preferred, and all is done but launching them: `record` is told their names."""
    with ExitStack() as stack:
        for name, (said, parts) in _kernels().items():
            module = import_module(f"encoder_core.kernels.{name}")
            for part in parts:
                stack.enter_context(patch.object(module, f"{part}_kernel", _Kernel(f"{said} {part}", record)))
            if name == "fused_attention":
                stack.enter_context(patch.object(module, "compute_generation", lambda device: 9))
        set_preference(Preference((), (), dict.fromkeys(("norm", "loss", "update"), ("fused", "written"))))
        stack.callback(set_preference, None)
        yield


class _Kernel:
    """Is not launched."""

    def __init__(self, name: str, record: Callable[[str], None]) -> None:
        self._name, self._record = name, record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **options: self._record(self._name)
