"""The code that torch's compiler generates for GPUs, executed on a CPU, so that it is tested where there is no GPU.

For a CPU inductor generates C++. It can generate Triton's kernels instead, and Triton's interpreter executes them.
Products of matrices stay torch's own. Triton must have been imported with TRITON_INTERPRET=1.

By torch 2.11 these forward kernels, in which dropout is drawn, are those for CUDA letter by letter, at bf16 of RoBERTa,
XLNet, ModernBERT and EuroBERT. Backward kernels are divided otherwise among each other; their integers are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import triton.language as tl
from kernels import GpuDriver
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers
from torch._inductor.utils import fresh_cache
from triton.runtime import driver
from triton.runtime.interpreter import interpreter_builder

CPU = torch.device("cpu")

_SETTINGS = {
    "cpu_backend": "triton",
    "force_pointwise_cat": True,  # as for a GPU, where one kernel joins tensors and computes what it joins
    "compile_threads": 1,
    "fx_graph_cache": False,
}


@contextmanager
def gpu_code() -> Iterator[list[str]]:
    """While this lasts, what is compiled for a CPU is what a GPU would get. The sources of kernels are in the list.

    A kernel raises an error if a sum, a difference or a product overflows in 32 bits: so small sizes show what large
    ones would do wrong, if the factor is a constant.
    """
    sources: list[str] = []
    before = driver._active
    driver.set_active(GpuDriver())
    with ExitStack() as stack:
        stack.callback(setattr, driver, "_active", before)
        stack.enter_context(inductor.patch(_SETTINGS))
        stack.enter_context(fresh_cache())
        checked = replace(interpreter_builder.options, debug=True)
        stack.enter_context(patch.object(interpreter_builder, "options", checked))
        stack.enter_context(patch.object(triton_helpers, "libdevice", _LIBDEVICE))
        stack.enter_context(patch.object(AsyncCompile, "triton", _kept(sources)))
        yield sources


def _kept(sources: list[str]) -> Callable[..., Any]:
    """Inductor's own function that loads a kernel, which also keeps the kernel's source."""
    load = AsyncCompile.triton

    def loaded(self: AsyncCompile, name: str, source: str, **options: Any) -> Any:
        sources.append(source)
        return load(self, name, source, **options)

    return loaded


def _tanh(x: Any) -> Any:
    return 2 * tl.sigmoid(2 * x) - 1


# NVIDIA's library of functions has no code that the interpreter could execute.
_LIBDEVICE = SimpleNamespace(
    erf=lambda x: tl.math.erf(x),
    exp=lambda x: tl.math.exp(x),
    rsqrt=lambda x: tl.math.rsqrt(x),
    tanh=_tanh,
)
