"""The path that attention takes on a GPU, without one: all is done but launching kernels, whose names are told."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from encoder_core.layers import attention, deberta_attention
from encoder_core.layers.attention import SelfAttention
from encoder_core.layers.deberta_attention import DisentangledAttention


@contextmanager
def as_on_a_gpu(module: nn.Module, record: Callable[[str], None]) -> Iterator[None]:
    """`module`'s attention, on a CPU, as in bf16 on a GPU: flash without dropout, else our fused kernels."""
    for part in module.modules():
        if isinstance(part, DisentangledAttention):
            part.attend = deberta_attention.fused
        elif isinstance(part, SelfAttention) and part.attend is attention.automatic:
            part.attend = attention.fused if part.dropout else _flash(record)
    with ExitStack() as stack:
        for room in ("relative_key", "xlnet_attention"):
            place = import_module(f"encoder_core.layers.{room}")
            stack.enter_context(patch.object(place, "fused_takes", lambda device, dtype, width: True))
        cross_entropy = import_module("encoder_core.heads.cross_entropy")
        if hasattr(cross_entropy, "MULTIPLES"):
            stack.enter_context(patch.dict(cross_entropy.MULTIPLES, cpu=64))
        stack.enter_context(launched(record))
        yield


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
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            record("flash backward")
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])

    return lambda q, k, v, rows, dropout, window=None: Flash.apply(q, k, v)


@contextmanager
def launched(record: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, the fused attention does everything but launch its kernels: `record` is told their names."""
    from encoder_core.kernels import fused_attention

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: record(f"fused {self.name}")

    names = ("forward", "queries", "keys", "tables")
    before = {name: getattr(fused_attention, f"{name}_kernel") for name in names}
    generation = fused_attention.generation_of
    for name in names:
        setattr(fused_attention, f"{name}_kernel", Kernel(name))
    fused_attention.generation_of = lambda device: 9  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, kernel in before.items():
            setattr(fused_attention, f"{name}_kernel", kernel)
        fused_attention.generation_of = generation  # type: ignore[assignment]
