"""bf16 products under Triton's interpreter, as tensor cores make them.

The interpreter keeps bf16 numbers as the 16 bits that they are, in NumPy's uint16. Up to Triton 3.7.1 its `dot` hands
these to NumPy as integers: 20.5 becomes 2.4e10. Its cast of fp32 to bf16 cuts bits off where GPUs round. Here operands
are made fp32, which holds every bf16 exactly, before they are multiplied and summed in fp32, and casts round to the
nearest, ties to even.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


class InterpreterChanged(Exception):
    """Triton's interpreter is not the one that this file knows how to mend."""


def _widened(handle: Any, tl: Any, kind: type) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    if handle.data.dtype != np.uint16:
        raise InterpreterChanged(
            f"bf16 is kept as {handle.data.dtype}, not as uint16: see whether `dot` is right now"
        )
    return kind((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@contextmanager
def bf16_products() -> Iterator[None]:
    """While this lasts. Raises InterpreterChanged."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, kind = (
        getattr(interpreter, "InterpreterBuilder", None),
        getattr(interpreter, "TensorHandle", None),
    )
    given = getattr(builder, "create_dot", None)
    if given is None or kind is None:
        raise InterpreterChanged(
            "triton.runtime.interpreter has no InterpreterBuilder.create_dot or no TensorHandle"
        )

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return given(self, _widened(a, tl, kind), _widened(b, tl, kind), *others)

    cast = getattr(builder, "cast_impl", None)
    if cast is None:
        raise InterpreterChanged("triton.runtime.interpreter has no InterpreterBuilder.cast_impl")

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            return kind(_rounded(x.data), tl.bfloat16)
        return cast(self, x, to)

    with patch.object(builder, "create_dot", create_dot), patch.object(builder, "cast_impl", cast_impl):
        yield


def _rounded(x: Any) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), near)
